// From scores to logits, and which of them count: on a fragment of scores.
#pragma once

#include <cmath>

#include "attention/params.h"
#include "attention/rules.h"
#include "attention/sm90/forward/smem_plan.h"
#include "common/math.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90 {

// What the thread's two rows stand for in the tile at work.
struct Rows {
  int place[kRowsPerThread];  // among the keys
  int begin[kRowsPerThread];  // keys [begin, end) are seen
  int end[kRowsPerThread];
  float slope2[kRowsPerThread];  // ALiBi's, base 2

  __device__ __forceinline__ Rows(const ForwardParams& params, const Tile& tile, const Window& window,
                                  const Group& group, int first_row, const FragmentPosition& at) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = first_row + at.row(i);
      // Rows behind the tile's last are as good as its last: nobody asks for what comes of them.
      const int query = min(group.query_of(row), tile.tokens - 1);
      place[i] = tile.place + query;
      begin[i] = window.begin(place[i]);
      end[i] = window.end(place[i], tile.k_len);
      if (params.alibi != nullptr)
        slope2[i] =
            __ldg(params.alibi + tile.kv_head * group.size + row - group.query_of(row) * group.size) * kLog2E;
    }
  }
};

// Which of a thread's columns of a row are in front of column `end`: a bit for each, two of every eight.
__device__ __forceinline__ uint32_t columns_before(int end, const FragmentPosition& at) {
  const int own = max(end - at.in_quad * 2, 0), count = own / 8 * 2 + min(own % 8, 2);
  return count < 32 ? (1u << count) - 1 : ~0u;
}

// Of the keys from `first_key` on.
template <int kCount>
__device__ __forceinline__ void mask_outside(float (&rS)[kCount], const FragmentPosition& at, int first_key,
                                             const Rows& rows) {
  static_assert(kCount / kRowsPerThread <= 32);
  uint32_t seen[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    seen[i] = columns_before(rows.end[i] - first_key, at) & ~columns_before(rows.begin[i] - first_key, at);
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    if ((seen[FragmentPosition::row_of(r)] & 1u << (r / 4 * 2 + r % 2)) == 0) rS[r] = -INFINITY;
  }
}

// Times what each key's score is multiplied by.
template <int kCount>
__device__ __forceinline__ void scale_keys(float (&rS)[kCount], const float* scales,
                                           const FragmentPosition& at) {
#pragma unroll
  for (int r = 0; r < kCount; r += 4) {
    const float2 two = *reinterpret_cast<const float2*>(scales + at.column(r));
    rS[r] *= two.x, rS[r + 1] *= two.y, rS[r + 2] *= two.x, rS[r + 3] *= two.y;
  }
}

// softcap * tanh(x / softcap), by exponentials: the hardware's tanh is exact to 2^-11 only.
__device__ __forceinline__ float cap(float x, float by, float inverse2) {
  const float e = exp2_fast(fminf(x * inverse2, 126.0f));  // e^(2 x / by)
  return by - __fdividef(2.0f * by, e + 1.0f);
}

// Scores become logits in base 2, where there is a soft cap or ALiBi.
template <int kCount>
__device__ __forceinline__ void shape_logits(float (&rS)[kCount], const ForwardParams& params, float scale,
                                             const FragmentPosition& at, int first_key, const Rows& rows) {
  if (params.softcap > 0.0f) {
    const float inverse2 = 2.0f * kLog2E * scale / params.softcap, by = params.softcap * kLog2E;
#pragma unroll
    for (int r = 0; r < kCount; ++r) rS[r] = cap(rS[r], by, inverse2);
  }
  if (params.alibi == nullptr) return;
  // A row's biases are its first column's and a multiple of the slope that the compiler knows: no distance is
  // converted to a float of its own, which takes as long as two products.
  const float factor = params.softcap > 0.0f ? 1.0f : scale * kLog2E;
  float first[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    first[i] = rows.slope2[i] * static_cast<float>(first_key + at.column(0) - rows.place[i]);
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    const int i = FragmentPosition::row_of(r);
    const auto columns = static_cast<float>(FragmentPosition::columns_from_first(r));
    rS[r] = fmaf(rS[r], factor, fmaf(rows.slope2[i], columns, first[i]));
  }
}

}  // namespace pallas_attn::attention::sm90
