// From the lengths of sequences to lists of tiles.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

// Tokens of a tile that is held. `queries`: 0 if queries are not held.
struct Tiling {
  int keys, queries;
};

LaunchStatus launch_prepare(const BackwardParams& params, const Tiling& tiling, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
