#include "mla/sm90/dense/launch.h"

#include "mla/sm90/dense/instantiations/instantiations.h"
#include "mla/sm90/transposed/launch.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_dense_decode(const DecodeParams& params, cudaStream_t stream) {
  if (params.format == LatentFormat::kBytes) return transposed::launch_decode(params, stream);
  return params.element == ElementType::kBfloat16 ? launch_dense_decode_bfloat16(params, stream)
                                                  : launch_dense_decode_float16(params, stream);
}

}  // namespace pallas_attn::mla::sm90
