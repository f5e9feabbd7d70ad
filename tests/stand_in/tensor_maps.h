// Tensor maps of bytes and of 16 bits, as ptx/tma.h here reads them.
#pragma once

#include "ptx/tma.h"

namespace pallas_attn {

template <int kRank>
LaunchStatus encode_tensor_map(const TensorTile<kRank>& tile, CUtensorMapDataType dtype, CUtensorMap* map) {
  const bool bytes = dtype == CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const ptx::Map<kRank> encoded = {tile, bytes ? 1u : 2u, bytes ? 0u : 1u};
  std::memcpy(map, &encoded, sizeof(encoded));
  return {};
}

}  // namespace pallas_attn
