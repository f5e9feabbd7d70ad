#include "attention/sm90/backward/instantiations/instantiations.h"
#include "attention/sm90/backward/launch_impl.h"

namespace pallas_attn::attention::sm90::backward {

template <>
LaunchStatus launch_bfloat16<Shape96>(const BackwardParams& params, cudaStream_t stream) {
  return launch_instance<__nv_bfloat16, Shape96>(params, stream);
}

}  // namespace pallas_attn::attention::sm90::backward
