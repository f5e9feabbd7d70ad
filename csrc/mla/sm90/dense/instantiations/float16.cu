#include "mla/sm90/dense/instantiations/instantiations.h"
#include "mla/sm90/dense/kernel.h"
#include "mla/sm90/dense/launch_impl.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_dense_decode_float16(const DecodeParams& params, cudaStream_t stream) {
  return launch_instance({dense_decode_kernel<__half>, ElementTraits<__half>::kTensorMapType}, params,
                         stream);
}

}  // namespace pallas_attn::mla::sm90
