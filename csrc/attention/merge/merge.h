// Results of tiles whose keys were split, from their parts.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention {

// `tile_rows`: rows of a tile; `ctas`: about as many as run at once.
LaunchStatus launch_merge(const ForwardParams& params, int tile_rows, int ctas, cudaStream_t stream);

}  // namespace pallas_attn::attention
