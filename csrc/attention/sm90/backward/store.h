// Gradients of keys and values from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// 64 rows of an array of heads, each times `factor`; those that are not there are left out, and so are
// columns from `dim` on.
template <typename Element, int kCount, typename Has>
__device__ __forceinline__ void store_rows(void* array, int64_t place, int64_t token_stride, int dim,
                                           const float (&d)[kCount], float factor, const FragmentPosition& at,
                                           Has has) {
  const int column = at.in_quad * 8;
  auto* const to = static_cast<uint16_t*>(array) + place + column;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i), columns = has(row) ? dim - column : 0;
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {
      const uint4 eight = neighbours<Element>(d, i, group, factor, at.in_quad);
      if (group * 32 < columns) *reinterpret_cast<uint4*>(to + row * token_stride + group * 32) = eight;
    }
  }
}

}  // namespace pallas_attn::attention::sm90::backward
