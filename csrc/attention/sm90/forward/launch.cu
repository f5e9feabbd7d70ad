#include <algorithm>

#include "attention/sm90/forward/instantiations/instantiations.h"
#include "attention/sm90/forward/launch.h"
#include "attention/sm90/forward/shapes.h"

namespace pallas_attn::attention::sm90 {

TileRows tile_rows(int head_dim, int value_dim) {
  return with_shape(head_dim, value_dim, TileRows{0, 0}, [](auto shape) {
    using Shape = decltype(shape);
    return TileRows{std::min(Shape::kRows, Shape::Gathered::kRows), Shape::kRows};
  });
}

LaunchStatus launch_forward(const ForwardParams& params, cudaStream_t stream) {
  const LaunchStatus none = {cudaErrorInvalidValue, "no kernel has heads of this size"};
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    return params.element == ElementType::kBfloat16 ? launch_bfloat16<Shape>(params, stream)
                                                    : launch_float16<Shape>(params, stream);
  };
  if (params.lists.blocks != nullptr) {
    return with_listed_shape(params.head_dim, params.value_dim, none, launch);
  }
  return with_shape(params.head_dim, params.value_dim, none, launch);
}

}  // namespace pallas_attn::attention::sm90
