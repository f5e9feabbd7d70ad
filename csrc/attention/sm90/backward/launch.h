// Host entry point of attention's backward pass on Hopper.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

// Of the tiles for heads of these sizes, and columns of their sums; 0: no kernel has such heads.
struct TileSizes {
  int queries, keys, sum_columns;
};
TileSizes tile_sizes(int head_dim, int value_dim);

LaunchStatus launch_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
