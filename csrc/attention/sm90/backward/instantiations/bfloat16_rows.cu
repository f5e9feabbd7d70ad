#include "attention/sm90/backward/instantiations/instantiations.h"
#include "attention/sm90/backward/wide/launch_impl.h"

namespace pallas_attn::attention::sm90::backward {

template <>
LaunchStatus launch_bfloat16<wide::Rows64>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__nv_bfloat16, wide::Rows64>(params, stream);
}

template <>
LaunchStatus launch_bfloat16<wide::Rows128>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__nv_bfloat16, wide::Rows128>(params, stream);
}

template <>
LaunchStatus launch_bfloat16<wide::Rows256>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__nv_bfloat16, wide::Rows256>(params, stream);
}

}  // namespace pallas_attn::attention::sm90::backward
