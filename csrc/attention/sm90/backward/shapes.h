// Which shape serves which heads.
#pragma once

#include "attention/sm90/backward/config.h"
#include "attention/sm90/backward/wide/config.h"

namespace pallas_attn::attention::sm90::backward {

// visit(Shape{}) with the smallest shape that holds both; `none` if there is none.
template <typename Visit, typename Result>
Result with_shape(int head_dim, int value_dim, Result none, Visit visit) {
  const int widest = head_dim > value_dim ? head_dim : value_dim;
  if (widest <= 64) return visit(Shape64{});
  if (widest <= 96) return visit(Shape96{});
  if (widest <= 128) return visit(Shape128{});
  if (head_dim <= 192 && value_dim <= 128) return visit(wide::Shape192x128{});
  if (widest <= 256) return visit(wide::Shape256{});
  return none;
}

// The same where lists name the blocks that meet, or a layout does.
template <wide::Meets kMeets, typename Visit, typename Result>
Result with_listed_shape(int head_dim, int value_dim, Result none, Visit visit) {
  const int widest = head_dim > value_dim ? head_dim : value_dim;
  if (widest <= 64) return visit(wide::ShapeOf<64, 64, kMeets>{});
  if (widest <= 128) return visit(wide::ShapeOf<128, 128, kMeets>{});
  if (widest <= 256) return visit(wide::ShapeOf<256, 256, kMeets>{});
  return none;
}

}  // namespace pallas_attn::attention::sm90::backward
