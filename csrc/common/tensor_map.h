// Host side of the bulk tensor copy engine: building CUtensorMap objects.
//
// The encoder is a driver function. It is looked up at run time, so the library carries no dependency on
// libcuda and loads on machines without a driver.
#pragma once

#include <cuda.h>

#include "common/status.h"
#include "common/tensor_tile.h"

namespace pallas_attn {

// Tiles of three to five dimensions with the 128-byte swizzle, of bytes without; out-of-range elements read
// as zero.
template <int kRank>
LaunchStatus encode_tensor_map(const TensorTile<kRank>& tile, CUtensorMapDataType dtype, CUtensorMap* map);

}  // namespace pallas_attn
