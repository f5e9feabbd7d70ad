#include "attention/sm90/forward/instantiations/instantiations.h"
#include "attention/sm90/forward/launch_impl.h"

namespace pallas_attn::attention::sm90 {

template <>
LaunchStatus launch_bfloat16<Shape64>(const ForwardParams& params, cudaStream_t stream) {
  return launch_instance<__nv_bfloat16, Shape64>(params, stream);
}

}  // namespace pallas_attn::attention::sm90
