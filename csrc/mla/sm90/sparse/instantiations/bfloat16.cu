#include "mla/sm90/sparse/instantiations/instantiations.h"
#include "mla/sm90/sparse/launch_impl.h"
#include "mla/sm90/sparse/row_copier.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_sparse_bfloat16(const SparseParams& params, cudaStream_t stream) {
  return launch_sparse_instance<__nv_bfloat16, RowCopier>(params, stream);
}

}  // namespace pallas_attn::mla::sm90
