#include "attention/sm90/forward/instantiations/instantiations.h"
#include "attention/sm90/forward/launch_impl.h"

namespace pallas_attn::attention::sm90 {

template <>
LaunchStatus launch_float16<Shape64::Listed>(const ForwardParams& params, cudaStream_t stream) {
  return launch_listed<__half, Shape64::Listed>(params, stream);
}

template <>
LaunchStatus launch_float16<Shape128::Listed>(const ForwardParams& params, cudaStream_t stream) {
  return launch_listed<__half, Shape128::Listed>(params, stream);
}

template <>
LaunchStatus launch_float16<Shape256::Listed>(const ForwardParams& params, cudaStream_t stream) {
  return launch_listed<__half, Shape256::Listed>(params, stream);
}

}  // namespace pallas_attn::attention::sm90
