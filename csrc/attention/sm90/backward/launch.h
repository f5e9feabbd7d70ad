// Host entry point of attention's backward pass on Hopper.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

// What heads of these sizes take, where lists name blocks or not: passes, 0 if no kernel has such heads;
// tokens of a tile that is held; and columns of sums, 0 if no gradients are added up in memory.
struct Needs {
  int passes, held, sum_columns;
};
Needs needs_of(int head_dim, int value_dim, bool listed);

LaunchStatus launch_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
