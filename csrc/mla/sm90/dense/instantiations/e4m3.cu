#include "mla/sm90/dense/instantiations/instantiations.h"
#include "mla/sm90/dense/launch_impl.h"
#include "mla/sm90/dense/quantized_kernel.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_dense_decode_e4m3(const DecodeParams& params, cudaStream_t stream) {
  // Its CTAs have no registers to merge with.
  return launch_instance({quantized_decode_kernel, ElementTraits<__nv_bfloat16>::kTensorMapType,
                          CU_TENSOR_MAP_DATA_TYPE_UINT8, /*most_cut_requests=*/0},
                         params, stream);
}

}  // namespace pallas_attn::mla::sm90
