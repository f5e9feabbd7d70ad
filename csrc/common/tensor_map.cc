#include "common/tensor_map.h"

#include <cuda_runtime.h>

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

LaunchStatus encode_tensor_map(const TensorMapSpec& spec, CUtensorMap* map) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) return {cudaErrorSymbolNotFound, "looking up cuTensorMapEncodeTiled in the driver"};

  const uint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encode(map, spec.dtype, /*rank=*/3, const_cast<void*>(spec.base), spec.extent, spec.strides_bytes,
             spec.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {cudaErrorInvalidValue, "encoding a tensor map"};
  return {};
}

}  // namespace pallas_attn
