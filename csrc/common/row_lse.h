// A row's log-sum-exp in two parts, because a large maximum leaves one float no digits for the sum.
#pragma once

namespace pallas_attn {

// 2^maximum * total is the sum of exponentials; total is 0 where nothing was seen, and NaN for a row that
// cannot be right.
struct alignas(8) RowLse {
  float maximum;  // in base 2
  float total;
};

}  // namespace pallas_attn
