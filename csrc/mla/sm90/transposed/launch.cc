#include "mla/sm90/transposed/launch.h"

#include "mla/sm90/transposed/instantiations/instantiations.h"

namespace pallas_attn::mla::sm90::transposed {

LaunchStatus launch_decode(const DecodeParams& params, cudaStream_t stream) {
  if (params.rows() <= 16) return launch_rows_16(params, stream);
  if (params.rows() <= 32) return launch_rows_32(params, stream);
  return launch_rows_64(params, stream);
}

LaunchStatus launch_sparse(const SparseParams& params, cudaStream_t stream) {
  if (params.group <= 16) return launch_chosen_16(params, stream);
  if (params.group <= 32) return launch_chosen_32(params, stream);
  return launch_chosen_64(params, stream);
}

}  // namespace pallas_attn::mla::sm90::transposed
