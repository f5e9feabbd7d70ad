// From the lengths of a batch to the work items of the forward kernel, the longest first.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention {

constexpr int kMostPreparedSeqs = 8192;  // whose tiles are counted in shared memory

// How the forward kernel cuts its work up.
struct Tiling {
  int tokens;  // queries of a tile
  int keys;    // of a key tile
  int ctas;    // that run at once
};

LaunchStatus launch_prepare(const ForwardParams& params, const Tiling& tiling, cudaStream_t stream);

}  // namespace pallas_attn::attention
