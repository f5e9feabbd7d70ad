#include "blocksparse/sm90/instantiations/instantiations.h"
#include "blocksparse/sm90/launch_impl.h"

namespace pallas_attn::blocksparse::sm90 {

LaunchStatus launch_prefill_float16(const PrefillParams& params, cudaStream_t stream) {
  return launch_instance<__half>(params, stream);
}

}  // namespace pallas_attn::blocksparse::sm90
