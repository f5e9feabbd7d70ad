#include "attention/sm90/backward/instantiations/instantiations.h"
#include "attention/sm90/backward/wide/launch_impl.h"

namespace pallas_attn::attention::sm90::backward {

template <>
LaunchStatus launch_float16<wide::Listed64>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__half, wide::Listed64>(params, stream);
}

template <>
LaunchStatus launch_float16<wide::Listed128>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__half, wide::Listed128>(params, stream);
}

template <>
LaunchStatus launch_float16<wide::Listed256>(const BackwardParams& params, cudaStream_t stream) {
  return wide::launch_instance<__half, wide::Listed256>(params, stream);
}

}  // namespace pallas_attn::attention::sm90::backward
