#include "attention/sm90/backward/instantiations/instantiations.h"
#include "attention/sm90/backward/launch.h"
#include "attention/sm90/backward/shapes.h"

namespace pallas_attn::attention::sm90::backward {

Needs needs_of(int head_dim, int value_dim, bool listed) {
  if (listed) {
    return with_listed_shape<wide::Meets::kListed>(head_dim, value_dim, Needs{}, [](auto shape) {
      return Needs{decltype(shape)::kPasses, wide::kHeld, 0};
    });
  }
  return with_shape(head_dim, value_dim, Needs{}, [](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Shape::kPasses == 1) return Needs{1, Shape::kKeys, Shape::kSumColumns};
    return Needs{Shape::kPasses, wide::kHeld, 0};
  });
}

LaunchStatus launch_backward(const BackwardParams& params, cudaStream_t stream) {
  const LaunchStatus none = {cudaErrorInvalidValue, "no kernel has heads of this size"};
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    return params.element == ElementType::kBfloat16 ? launch_bfloat16<Shape>(params, stream)
                                                    : launch_float16<Shape>(params, stream);
  };
  if (params.of_keys.blocks != nullptr) {
    return with_listed_shape<wide::Meets::kListed>(params.head_dim, params.value_dim, none, launch);
  }
  if (params.rows_of_keys.pointers != nullptr) {
    return with_listed_shape<wide::Meets::kRows>(params.head_dim, params.value_dim, none, launch);
  }
  return with_shape(params.head_dim, params.value_dim, none, launch);
}

}  // namespace pallas_attn::attention::sm90::backward
