// Online softmax on a fragment. Exponentials are of (score - maximum) * scale * log2(e): subtracted before
// anything is scaled, so that the maximum's own is 1 whatever its size.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/element_traits.h"
#include "common/math.h"
#include "common/row_lse.h"
#include "sm90/fragment.h"

namespace pallas_attn {
inline namespace sm90 {

// The running maximum follows the true one only when it falls behind by this many powers of two: exponentials
// stay below 2^8, exact enough in bf16 and far from fp16's limit, and the output is almost never rescaled.
constexpr float kRescaleSlack = 8.0f;

// Below no real score, yet finite, so that differences of maxima are never NaN.
constexpr float kNoMaximum = -FLT_MAX;

// What one warpgroup knows of a thread's two rows.
struct RowState {
  float maximum[kRowsPerThread];  // of scores, not scaled
  float sum[kRowsPerThread];      // of this thread's columns of this warpgroup's pages
  float peak[kRowsPerThread];     // what `maximum` follows, of this warpgroup's pages; free where nobody asks

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      maximum[i] = kNoMaximum;
      sum[i] = 0.0f;
      peak[i] = -INFINITY;
    }
  }
};

// What the product with a factor loses to rounding goes into the sum, in which it is `left` powers of two.
// Where that would be very many, scores next to each other are further apart.
__device__ __forceinline__ RowLse in_base_2(float maximum, float total, float factor, float& left) {
  constexpr float kMost = 64.0f;
  const float rounded = fmaxf(__fmul_rn(maximum, factor), kNoMaximum);
  left = exp2_fast(fminf(fmaxf(fmaf(maximum, factor, -rounded), -kMost), kMost));
  return {rounded, total * left};
}

__device__ __forceinline__ float log2_of(const RowLse& lse) {
  return lse.total == 0.0f ? -INFINITY : lse.maximum + log2f(lse.total);
}

// What complete sums and maxima come to, of scores that `scale_log2` makes base 2. Rows that saw nothing give
// 0 and -inf.
struct RowEnds {
  float factor[kRowsPerThread];
  RowLse lse[kRowsPerThread];

  __device__ RowEnds(const RowState& state, float scale_log2) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const bool empty = state.sum[i] == 0.0f;  // false for NaN, which must survive
      factor[i] = empty ? 0.0f : __fdividef(1.0f, state.sum[i]);
      float left;
      lse[i] = in_base_2(state.maximum[i], state.sum[i], scale_log2, left);
      if (empty) lse[i].maximum = -INFINITY;
    }
  }
};

// What a further logit without a value leaves of a row's probability; `sink` in natural units.
__device__ __forceinline__ float share_beside_sink(const RowLse& lse, float sink) {
  // Where nothing was seen there is nothing to share, also beside a sink of -inf.
  if (lse.total == 0.0f) return 0.0f;
  return 1.0f / (1.0f + exp2f(sink * kLog2E - lse.maximum) / lse.total);
}

// The log-sum-exp that it joins.
__device__ __forceinline__ RowLse beside_sink(const RowLse& lse, float sink) {
  const float sink2 = fmaxf(sink * kLog2E, kNoMaximum);
  if (lse.total == 0.0f) return {sink2, sink == -INFINITY ? 0.0f : 1.0f};
  const float top = fmaxf(lse.maximum, sink2);
  return {top, lse.total * exp2f(lse.maximum - top) + exp2f(sink2 - top)};
}

// Keys a row may see: [0, visible[i]); the fragment's first column is key `first_key`.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&rS)[kCount], const FragmentPosition& at, int first_key,
                                            const int (&visible)[kRowsPerThread]) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    if (first_key + at.column(r) >= visible[FragmentPosition::row_of(r)]) rS[r] = -INFINITY;
  }
}

// Below this, in base 2, a maximum and its product with the scale differ by 2^-12 at most, and exponentials
// may be of one fused product with what it is rounded to.
constexpr float kFusedBelow = 4096.0f;

// Two probabilities of a row as its sum takes them: as they are, or as the value product does.
struct Exact {
  static __device__ __forceinline__ float2 of(float left, float right) { return make_float2(left, right); }
};
template <typename Element>
struct Rounded {
  static __device__ __forceinline__ float2 of(float left, float right) {
    return ElementTraits<Element>::unpack(ElementTraits<Element>::pack(left, right));
  }
};

// Turns scores into probabilities, moves the running maximum and sum, and says by what the rows' earlier
// results must be multiplied; false if that is 1 for all rows of the warp.
template <typename Summed = Exact, int kCount>
__device__ __forceinline__ bool exponentiate(float (&rS)[kCount], float scale_log2, RowState& state,
                                             float (&rescale)[kRowsPerThread]) {
  const auto is_large = [&](float maximum) { return fabsf(maximum * scale_log2) >= kFusedBelow; };
  // Even and odd columns apart: four chains hide an instruction's latency.
  float even[kRowsPerThread], odd[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) even[i] = odd[i] = -INFINITY;
#pragma unroll
  for (int r = 0; r < kCount; r += 2) {
    const int i = FragmentPosition::row_of(r);
    even[i] = fmaxf(even[i], rS[r]);
    odd[i] = fmaxf(odd[i], rS[r + 1]);
  }
  float top[kRowsPerThread];
  bool usual = true;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    top[i] = quad_reduce(fmaxf(even[i], odd[i]), [](float a, float b) { return fmaxf(a, b); });
    state.peak[i] = fmaxf(state.peak[i], top[i]);
    rescale[i] = 1.0f;
    // A row whose maximum is NaN, and stays so, has no say.
    usual &= !((top[i] - state.maximum[i]) * scale_log2 > kRescaleSlack) && !is_large(state.maximum[i]);
  }
  // After the first key tiles almost never otherwise.
  bool fused = true, moved = false;
  if (!__all_sync(0xffffffff, usual)) {
    bool large = false;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float before = state.maximum[i];
      if ((top[i] - before) * scale_log2 > kRescaleSlack) {
        state.maximum[i] = top[i];
        // Nothing to rescale yet: one, so that nobody does.
        if (before != kNoMaximum) rescale[i] = exp2_fast((before - top[i]) * scale_log2);
      }
      moved |= rescale[i] != 1.0f;
      large |= state.maximum[i] != kNoMaximum && is_large(state.maximum[i]);
    }
    moved = __any_sync(0xffffffff, moved);
    // Rarely: the maximum is subtracted first, and costs an instruction more.
    fused = !__any_sync(0xffffffff, large);
  }
  float sum[kRowsPerThread] = {};
  const auto add_up = [&](int r) {
    const float2 pair = Summed::of(rS[r], rS[r + 1]);
    sum[FragmentPosition::row_of(r)] += pair.x;
    sum[FragmentPosition::row_of(r)] += pair.y;
  };
  if (fused) {
    float offset[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      offset[i] = state.maximum[i] == kNoMaximum ? 0.0f : state.maximum[i] * scale_log2;
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      rS[r] = exp2_fast(fmaf(rS[r], scale_log2, -offset[FragmentPosition::row_of(r)]));
      if (r % 2 == 1) add_up(r - 1);
    }
  } else {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      rS[r] = exp2_fast((rS[r] - state.maximum[FragmentPosition::row_of(r)]) * scale_log2);
      if (r % 2 == 1) add_up(r - 1);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) state.sum[i] = fmaf(state.sum[i], rescale[i], sum[i]);
  return moved;
}

// Probabilities as the A operand of the value product.
template <typename Element, int kCount>
__device__ __forceinline__ void pack_probabilities(const float (&rS)[kCount], uint32_t (&rP)[kCount / 8][4]) {
#pragma unroll
  for (int step = 0; step < kCount / 8; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rP[step][j] = ElementTraits<Element>::pack(rS[step * 8 + j * 2], rS[step * 8 + j * 2 + 1]);
  }
}

// Both at once.
template <typename Element, int kCount>
__device__ __forceinline__ void softmax_step(float (&rS)[kCount], float scale_log2, RowState& state,
                                             float (&rescale)[kRowsPerThread],
                                             uint32_t (&rP)[kCount / 8][4]) {
  exponentiate(rS, scale_log2, state, rescale);
  pack_probabilities<Element>(rS, rP);
}

template <int kCount>
__device__ __forceinline__ void multiply_rows(float (&rO)[kCount], const float (&factor)[kRowsPerThread]) {
#pragma unroll
  for (int r = 0; r < kCount; ++r) rO[r] *= factor[FragmentPosition::row_of(r)];
}

// The same where factors are almost always one, and then nothing happens.
template <int kCount>
__device__ __forceinline__ void rescale_rows(float (&rO)[kCount], const float (&rescale)[kRowsPerThread]) {
  if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) multiply_rows(rO, rescale);
}

}  // namespace sm90
}  // namespace pallas_attn
