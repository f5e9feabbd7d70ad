// From the lengths of a batch to the work items of the forward kernel, the longest first.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention {

constexpr int kMostPreparedSeqs = 8192;  // whose tiles are counted in shared memory

// `tile_tokens`: queries of a tile; `tile_keys`: keys of a key tile.
LaunchStatus launch_prepare(const ForwardParams& params, int tile_tokens, int tile_keys, cudaStream_t stream);

}  // namespace pallas_attn::attention
