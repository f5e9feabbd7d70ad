// A key tile's scores become probabilities, without a look at their maxima: those are found in the first key
// tile that a row sees, and again only if probabilities come out too large, which their sum tells. Scores
// stay as they are until then. Looking took a sixth of a step.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/element_traits.h"
#include "common/math.h"
#include "ptx/control.h"
#include "sm90/fragment.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::attention::sm90 {

// What a thread's share of a row may add up to: fp16 holds each of the probabilities. Behind a new maximum
// they are at most 2^kRescaleSlack, which 32 of a thread stay below.
constexpr float kMostOfShare = 16384.0f;

// The running maxima follow those of the scores. What earlier results must be multiplied by; false if that is
// 1 for all rows of the warp. A probability is 2^(score * factor - offset): where maxima are so large that
// rounding their product with the factor would count, scores become that difference here.
template <int kCount>
__device__ __forceinline__ bool follow_maxima(float (&rS)[kCount], float& factor,
                                              float (&offset)[kRowsPerThread], RowState& state, bool& settled,
                                              float (&rescale)[kRowsPerThread]) {
  bool moved = false, missing = false, large = false;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    // Even and odd columns apart: more chains hide an instruction's latency.
    float even = -INFINITY, odd = -INFINITY;
#pragma unroll
    for (int r = i * 2; r < kCount; r += 4) {
      even = fmaxf(even, rS[r]);
      odd = fmaxf(odd, rS[r + 1]);
    }
    const float top = quad_reduce(fmaxf(even, odd), [](float a, float b) { return fmaxf(a, b); });
    const float before = state.maximum[i];
    rescale[i] = 1.0f;
    // A row whose maximum is NaN, and stays so, has no say.
    if ((top - before) * factor > kRescaleSlack) {
      state.maximum[i] = top;
      // Nothing to rescale yet: one, so that nobody does.
      if (before != kNoMaximum) rescale[i] = exp2_fast((before - top) * factor);
    }
    state.sum[i] *= rescale[i];
    const bool none = state.maximum[i] == kNoMaximum;
    offset[i] = none ? 0.0f : state.maximum[i] * factor;
    moved |= rescale[i] != 1.0f;
    missing |= none;
    large |= fabsf(offset[i]) >= kFusedBelow;
  }
  settled = !__any_sync(0xffffffff, missing || large);
  if (!settled && __any_sync(0xffffffff, large)) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) rS[r] = (rS[r] - state.maximum[FragmentPosition::row_of(r)]) * factor;
    factor = 1.0f;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) offset[i] = 0.0f;
  }
  return __any_sync(0xffffffff, moved);
}

// Some scores, from those of step kFirst of the value product on, become probabilities: its A operand, and
// what a thread's rows add up to.
template <typename Element, typename Summed, int kFirst, int kCount, int kSteps>
__device__ __forceinline__ void exponentiate(const float (&rS)[kCount], float factor,
                                             const float (&offset)[kRowsPerThread],
                                             float (&sum)[kRowsPerThread], uint32_t (&rP)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = (kFirst + step) * 8 + j * 2, i = FragmentPosition::row_of(r);
      const float left = exp2_fast(fmaf(rS[r], factor, -offset[i]));
      const float right = exp2_fast(fmaf(rS[r + 1], factor, -offset[i]));
      rP[step][j] = ElementTraits<Element>::pack(left, right);
      const float2 pair = Summed::of(left, right);
      sum[i] += pair.x;
      sum[i] += pair.y;
    }
  }
}

// Whether a warp's probabilities are small enough.
__device__ __forceinline__ bool fit(const float (&sum)[kRowsPerThread]) {
  bool fits = true;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) fits &= !(sum[i] > kMostOfShare);
  return __all_sync(0xffffffff, fits);
}

// Scores become probabilities, the A operand of the value product: the first half of them beside the last
// product with values, which reads the probabilities of the step before, in registers of their own; the
// others over those, once `finish_values` has waited for it. False if that was not to be, for want of maxima.
template <typename Element, typename Summed, int kCount, int kSteps, typename Finish>
__device__ __forceinline__ bool to_probabilities(const float (&rS)[kCount], float factor, RowState& state,
                                                 bool settled, uint32_t (&rP)[kSteps][4],
                                                 Finish finish_values) {
  constexpr int kEarly = kSteps / 2;
  float offset[kRowsPerThread], sum[kRowsPerThread] = {};
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) offset[i] = state.maximum[i] * factor;
  uint32_t early[kEarly][4];
  // Branches, whose outcome the compiler cannot know, keep it from waiting in front of the exponentials. All
  // warps wait at one place: they may differ in this.
  const int begins = ptx::another(static_cast<int>(settled));
  if (__builtin_expect(begins, true)) exponentiate<Element, Summed, 0>(rS, factor, offset, sum, early);
  finish_values();
  if (__builtin_expect(!begins, false)) return false;
  auto& late = reinterpret_cast<uint32_t (&)[kSteps - kEarly][4]>(rP[kEarly]);
  exponentiate<Element, Summed, kEarly>(rS, factor, offset, sum, late);
  const bool fine = fit(sum);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) state.sum[i] += fine ? sum[i] : 0.0f;
#pragma unroll
  for (int step = 0; step < kEarly; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) rP[step][j] = early[step][j];
  }
  return fine;
}

// The same behind a look at maxima. Whether earlier results are to be multiplied by `rescale`.
template <typename Element, typename Summed, int kCount, int kSteps>
__device__ __forceinline__ bool follow_to_probabilities(float (&rS)[kCount], float factor, RowState& state,
                                                        bool& settled, float (&rescale)[kRowsPerThread],
                                                        uint32_t (&rP)[kSteps][4]) {
  float offset[kRowsPerThread], sum[kRowsPerThread] = {};
  const bool moved = follow_maxima(rS, factor, offset, state, settled, rescale);
  exponentiate<Element, Summed, 0>(rS, factor, offset, sum, rP);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) state.sum[i] += sum[i];
  return moved;
}

}  // namespace pallas_attn::attention::sm90
