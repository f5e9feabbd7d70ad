// From scores to weights, and from gradients of weights to those of scores, by what is known of each query:
// its log-sum-exp and delta. Queries are the columns of a fragment where keys are held, else
// its rows; of four neighbouring registers a thread's belong to two.
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/rows.h"
#include "common/math.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// Of registers r to r + 3: the two numbers, and which of them is register j's. The log-sum-exp is base 2.
//
// All quads of a warp need those of the same columns. Each lane has two neighbouring columns' and hands them
// on when they are asked for: to read the same 16 bytes in eight lanes takes shared memory, which is busy
// with products, as long as to read others in each.
template <int kQueries>
class OfColumns {
 public:
  __device__ __forceinline__ OfColumns(const Rows<kQueries>& rows, int thread, float factor)
      : in_quad_(thread % 4) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int pair = i * 32 + thread % 32;
      const float4 lse = *reinterpret_cast<const float4*>(rows.lse[pair]);
      const float2 delta = *reinterpret_cast<const float2*>(rows.delta[pair]);
      lse_[i][0] = fmaf(factor, lse.x, lse.z), lse_[i][1] = fmaf(factor, lse.y, lse.w);
      delta_[i][0] = delta.x, delta_[i][1] = delta.y;
    }
  }

  static __device__ constexpr int which(int j) { return j % 2; }
  __device__ __forceinline__ void lse(int r, float (&lse)[2]) const {
    for (int i = 0; i < 2; ++i) lse[i] = of(r, lse_[r / 32][i]);
  }
  __device__ __forceinline__ void delta(int r, float (&delta)[2]) const {
    for (int i = 0; i < 2; ++i) delta[i] = of(r, delta_[r / 32][i]);
  }

 private:
  static constexpr int kOwn = kQueries / 64;

  __device__ __forceinline__ float of(int r, float own) const {
    return __shfl_sync(0xffffffff, own, r % 32 + in_quad_);
  }

  const int in_quad_;
  float lse_[kOwn][2], delta_[kOwn][2];
};

// Deltas that have been handed on, before what they are taken off is there.
template <int kQueries>
class Handed {
 public:
  __device__ __forceinline__ explicit Handed(const OfColumns<kQueries>& numbers) {
#pragma unroll
    for (int r = 0; r < kQueries / 2; r += 4) numbers.delta(r, delta_[r / 4]);
  }
  static __device__ constexpr int which(int j) { return OfColumns<kQueries>::which(j); }
  __device__ __forceinline__ void delta(int r, float (&delta)[2]) const {
    for (int i = 0; i < 2; ++i) delta[i] = delta_[r / 4][i];
  }

 private:
  float delta_[kQueries / 8][2];
};

class OfRows {
 public:
  template <typename HeldRows>
  __device__ OfRows(const HeldRows& rows, int first_row, const FragmentPosition& at, float factor) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = first_row + at.row(i);
      lse_[i] = fmaf(factor, rows.maximum[row], rows.rest[row]), delta_[i] = rows.delta[row];
    }
  }

  static __device__ constexpr int which(int j) { return FragmentPosition::row_of(j); }
  __device__ __forceinline__ void lse(int, float (&lse)[2]) const {
    for (int i = 0; i < 2; ++i) lse[i] = lse_[i];
  }
  __device__ __forceinline__ void delta(int, float (&delta)[2]) const {
    for (int i = 0; i < 2; ++i) delta[i] = delta_[i];
  }

 private:
  float lse_[kRowsPerThread], delta_[kRowsPerThread];
};

class Weighing {
 public:
  __device__ explicit Weighing(const BackwardParams& params)
      : params_(params),
        factor_((tilted()   ? 1.0f
                 : capped() ? params.softcap
                            : params.scale) *
                kLog2E) {}

  // From what is weighed to logits, base 2.
  __device__ __forceinline__ float factor() const { return factor_; }
  __device__ __forceinline__ bool capped() const { return params_.softcap > 0.0f; }
  __device__ __forceinline__ bool tilted() const { return params_.alibi != nullptr; }

  // By ALiBi: scores [keys, queries] become natural logits. `ahead`: how far the thread's first key is ahead
  // of its first query.
  template <int kPairs>
  __device__ __forceinline__ void tilt(float (&rS)[kPairs], float slope, int ahead) const {
    const float first = slope * static_cast<float>(ahead);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const int more = FragmentPosition::row_of(r) * 8 - FragmentPosition::columns_from_first(r);
      rS[r] = fmaf(params_.scale, rS[r], fmaf(slope, static_cast<float>(more), first));
    }
  }

  // By a soft cap: scores become the hyperbolic tangent of what it makes of them, by exponentials: the
  // hardware's is exact to 2^-11 only.
  template <int kPairs>
  __device__ __forceinline__ void cap(float (&rS)[kPairs]) const {
    if (!capped()) return;
    const float twice2 = 2.0f * kLog2E * params_.scale / params_.softcap;
#pragma unroll
    for (float& x : rS) x = 1.0f - __fdividef(2.0f, exp2_fast(fminf(x * twice2, 126.0f)) + 1.0f);
  }

  // Scores become weights.
  template <typename Numbers, int kPairs>
  __device__ __forceinline__ void weigh(float (&rS)[kPairs], const Numbers& numbers) const {
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      float lse[2];
      numbers.lse(r, lse);
#pragma unroll
      for (int j = r; j < r + 4; ++j) rS[j] = exp2_fast(fmaf(factor_, rS[j], -lse[Numbers::which(j)]));
    }
  }

  // Gradients of weights become those of scores.
  template <typename Numbers, int kPairs>
  __device__ __forceinline__ void differentiate(const float (&rS)[kPairs], float (&rdP)[kPairs],
                                                const Numbers& numbers) const {
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      float delta[2];
      numbers.delta(r, delta);
#pragma unroll
      for (int j = r; j < r + 4; ++j) rdP[j] = rS[j] * (rdP[j] - delta[Numbers::which(j)]);
    }
  }

  // Gradients of capped scores become those of scores: times one less the square of what was capped, which is
  // found again from its weight.
  template <typename Numbers, int kPairs>
  __device__ __forceinline__ void bend(const float (&rS)[kPairs], float (&rdP)[kPairs],
                                       const Numbers& numbers) const {
    if (!capped()) return;
    const float inverse = 1.0f / factor_;
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      float lse[2];
      numbers.lse(r, lse);
#pragma unroll
      for (int j = r; j < r + 4; ++j) {
        const float capped = (log2_fast(rS[j]) + lse[Numbers::which(j)]) * inverse;
        rdP[j] = rS[j] == 0.0f ? 0.0f : rdP[j] * fmaf(-capped, capped, 1.0f);
      }
    }
  }

 private:
  const BackwardParams& params_;
  const float factor_;
};

}  // namespace pallas_attn::attention::sm90::backward
