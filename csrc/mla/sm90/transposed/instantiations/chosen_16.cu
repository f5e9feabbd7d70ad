#include "mla/sm90/transposed/chosen_tokens.h"
#include "mla/sm90/transposed/instantiations/instantiations.h"
#include "mla/sm90/transposed/launch_impl.h"

namespace pallas_attn::mla::sm90::transposed {

LaunchStatus launch_chosen_16(const SparseParams& params, cudaStream_t stream) {
  return launch_instance<ChosenTokens, 16>(params, stream);
}

}  // namespace pallas_attn::mla::sm90::transposed
