#include "common/tensor_map.h"

#include <cuda_runtime.h>

#include <string>

namespace pallas_attn {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kFirstVersionWithTensorMaps = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, kFirstVersionWithTensorMaps, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(entry);
}

}  // namespace

template <int kRank>
LaunchStatus encode_tensor_map(const TensorTile<kRank>& tile, CUtensorMapDataType dtype, CUtensorMap* map) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) {
    return status_of(cudaErrorSymbolNotFound, "looking up cuTensorMapEncodeTiled in the driver");
  }
  const uint32_t element_strides[5] = {1, 1, 1, 1, 1};
  // What a tile's row is. Asked for 256 bytes, which fetches a neighbour's row too, an H200 streams pages of
  // MLA up to 6% more slowly.
  constexpr CUtensorMapL2promotion kFetchedAtOnce = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const auto swizzle =
      dtype == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  const CUresult result = encode(map, dtype, kRank, const_cast<void*>(tile.base), tile.extent,
                                 tile.strides_bytes, tile.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle, kFetchedAtOnce, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // The driver's results and the runtime's errors share their numbers.
  return status_of(static_cast<cudaError_t>(result), std::string("encoding the tensor map of '") + tile.name +
                                                         "' (CUresult " + std::to_string(result) + ")");
}

template LaunchStatus encode_tensor_map(const TensorTile<3>&, CUtensorMapDataType, CUtensorMap*);
template LaunchStatus encode_tensor_map(const TensorTile<4>&, CUtensorMapDataType, CUtensorMap*);
template LaunchStatus encode_tensor_map(const TensorTile<5>&, CUtensorMapDataType, CUtensorMap*);

}  // namespace pallas_attn
