// From the lengths of sequences to the key tiles of the backward kernel.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

// Tokens of a tile.
struct Tiling {
  int queries, keys;
};

LaunchStatus launch_prepare(const BackwardParams& params, const Tiling& tiling, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
