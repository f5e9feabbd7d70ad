// Host entry point of attention's forward pass on Hopper.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90 {

// Rows (queries times heads of a KV head) of a tile for heads of these sizes, whoever brings its keys; 0: no
// kernel has such heads.
struct TileRows {
  int least, most;
};
TileRows tile_rows(int head_dim, int value_dim);

// Queues the kernel that orders the tiles, and the one that works on them.
LaunchStatus launch_forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90
