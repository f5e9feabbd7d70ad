#include "mla/sm90/transposed/all_tokens.h"
#include "mla/sm90/transposed/instantiations/instantiations.h"
#include "mla/sm90/transposed/launch_impl.h"

namespace pallas_attn::mla::sm90::transposed {

LaunchStatus launch_rows_32(const DecodeParams& params, cudaStream_t stream) {
  return launch_instance<AllTokens, 32>(params, stream);
}

}  // namespace pallas_attn::mla::sm90::transposed
