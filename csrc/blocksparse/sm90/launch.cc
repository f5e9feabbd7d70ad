#include "blocksparse/sm90/launch.h"

#include "blocksparse/sm90/instantiations/instantiations.h"

namespace pallas_attn::blocksparse::sm90 {

LaunchStatus launch_prefill(const PrefillParams& params, cudaStream_t stream) {
  const LaunchStatus status =
      status_of(cudaMemsetAsync(params.taken, 0, sizeof(*params.taken), stream), "zeroing the counter");
  if (!status.ok()) return status;
  return params.element == ElementType::kBfloat16 ? launch_prefill_bfloat16(params, stream)
                                                  : launch_prefill_float16(params, stream);
}

}  // namespace pallas_attn::blocksparse::sm90
