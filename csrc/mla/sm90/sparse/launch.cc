#include "mla/sm90/sparse/launch.h"

#include "mla/sm90/sparse/instantiations/instantiations.h"
#include "mla/sm90/transposed/launch.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_sparse(const SparseParams& params, cudaStream_t stream) {
  if (params.format == RowFormat::kFp8) {
    return params.max_logits == nullptr ? transposed::launch_sparse(params, stream)
                                        : launch_sparse_fp8(params, stream);
  }
  return params.element == ElementType::kBfloat16 ? launch_sparse_bfloat16(params, stream)
                                                  : launch_sparse_float16(params, stream);
}

}  // namespace pallas_attn::mla::sm90
