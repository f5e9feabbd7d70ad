#include "mla/sm90/sparse/instantiations/instantiations.h"
#include "mla/sm90/sparse/launch_impl.h"
#include "mla/sm90/sparse/pair_converter.h"
#include "mla/sm90/sparse/row_converter.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_sparse_fp8(const SparseParams& params, cudaStream_t stream) {
  const bool pairs = ceil_div(params.group, kTileRows) % 2 == 0;
  return pairs ? launch_sparse_instance<__nv_bfloat16, PairConverter>(params, stream)
               : launch_sparse_instance<__nv_bfloat16, RowConverter>(params, stream);
}

}  // namespace pallas_attn::mla::sm90
