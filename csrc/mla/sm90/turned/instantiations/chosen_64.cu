#include "mla/sm90/turned/chosen_tokens.h"
#include "mla/sm90/turned/instantiations/instantiations.h"
#include "mla/sm90/turned/launch_impl.h"

namespace pallas_attn::mla::sm90::turned {

LaunchStatus launch_chosen_64(const SparseParams& params, cudaStream_t stream) {
  return launch_instance<ChosenTokens, 64>(params, stream);
}

}  // namespace pallas_attn::mla::sm90::turned
