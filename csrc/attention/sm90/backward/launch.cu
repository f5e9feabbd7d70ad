#include "attention/sm90/backward/instantiations/instantiations.h"
#include "attention/sm90/backward/launch.h"
#include "attention/sm90/backward/shapes.h"

namespace pallas_attn::attention::sm90::backward {

TileSizes tile_sizes(int head_dim, int value_dim) {
  return with_shape(head_dim, value_dim, TileSizes{}, [](auto shape) {
    using Shape = decltype(shape);
    return TileSizes{Shape::kQueries, Shape::kKeys, Shape::kSumColumns};
  });
}

LaunchStatus launch_backward(const BackwardParams& params, cudaStream_t stream) {
  const LaunchStatus none = {cudaErrorInvalidValue, "no kernel has heads of this size"};
  return with_shape(params.head_dim, params.value_dim, none, [&](auto shape) {
    using Shape = decltype(shape);
    return params.element == ElementType::kBfloat16 ? launch_bfloat16<Shape>(params, stream)
                                                    : launch_float16<Shape>(params, stream);
  });
}

}  // namespace pallas_attn::attention::sm90::backward
