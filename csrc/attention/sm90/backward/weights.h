// From scores to weights, and from gradients of weights to those of scores, by what is known of each query:
// its log-sum-exp in two parts, and delta. Queries are the columns of a fragment where keys are held, else
// its rows; of four neighbouring registers a thread's belong to two.
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/rows.h"
#include "common/math.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// Of registers r to r + 3: the two numbers, and which of them is register j's.
template <int kQueries>
class OfColumns {
 public:
  // Of columns from `first` on, a multiple of 16.
  __device__ OfColumns(const Rows<kQueries>& rows, const FragmentPosition& at, int first = 0)
      : rows_(rows), in_quad_(at.in_quad), first_(first) {}

  static __device__ constexpr int which(int j) { return j % 2; }
  __device__ __forceinline__ void lse(int r, float (&maximum)[2], float (&rest)[2]) const {
    const float4 lse = *reinterpret_cast<const float4*>(rows_.lse[first_ / 2 + r + in_quad_]);
    maximum[0] = lse.x, maximum[1] = lse.y, rest[0] = lse.z, rest[1] = lse.w;
  }
  __device__ __forceinline__ void delta(int r, float (&delta)[2]) const {
    const float4 d = *reinterpret_cast<const float4*>(rows_.delta[first_ / 4 + r / 8 * 4 + in_quad_]);
    delta[0] = r % 8 < 4 ? d.x : d.z, delta[1] = r % 8 < 4 ? d.y : d.w;
  }

 private:
  const Rows<kQueries>& rows_;
  const int in_quad_, first_;
};

// The same, some of which are loaded here, before they are needed: shared memory is busy with products, and
// its answers take long. Deltas of registers 0 to 8 kDeltas - 1, log-sum-exps of 0 to 4 kLses - 1.
template <int kQueries, int kDeltas, int kLses>
class Early {
 public:
  __device__ __forceinline__ explicit Early(const OfColumns<kQueries>& numbers) : numbers_(numbers) {
#pragma unroll
    for (int i = 0; i < kDeltas; ++i) {
      numbers.delta(i * 8, delta_[i * 2]);
      numbers.delta(i * 8 + 4, delta_[i * 2 + 1]);
    }
#pragma unroll
    for (int i = 0; i < kLses; ++i) numbers.lse(i * 4, maximum_[i], rest_[i]);
  }

  static __device__ constexpr int which(int j) { return OfColumns<kQueries>::which(j); }
  __device__ __forceinline__ void lse(int r, float (&maximum)[2], float (&rest)[2]) const {
    if (r / 4 >= kLses) return numbers_.lse(r, maximum, rest);
    for (int i = 0; i < 2; ++i) maximum[i] = maximum_[r / 4][i], rest[i] = rest_[r / 4][i];
  }
  __device__ __forceinline__ void delta(int r, float (&delta)[2]) const {
    if (r / 8 >= kDeltas) return numbers_.delta(r, delta);
    for (int i = 0; i < 2; ++i) delta[i] = delta_[r / 4][i];
  }

 private:
  const OfColumns<kQueries> numbers_;
  float delta_[kDeltas * 2 + 1][2], maximum_[kLses + 1][2], rest_[kLses + 1][2];
};

class OfRows {
 public:
  template <typename HeldRows>
  __device__ OfRows(const HeldRows& rows, int first_row, const FragmentPosition& at) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = first_row + at.row(i);
      maximum_[i] = rows.maximum[row], rest_[i] = rows.rest[row], delta_[i] = rows.delta[row];
    }
  }

  static __device__ constexpr int which(int j) { return FragmentPosition::row_of(j); }
  __device__ __forceinline__ void lse(int, float (&maximum)[2], float (&rest)[2]) const {
    for (int i = 0; i < 2; ++i) maximum[i] = maximum_[i], rest[i] = rest_[i];
  }
  __device__ __forceinline__ void delta(int, float (&delta)[2]) const {
    for (int i = 0; i < 2; ++i) delta[i] = delta_[i];
  }

 private:
  float maximum_[kRowsPerThread], rest_[kRowsPerThread], delta_[kRowsPerThread];
};

class Weighing {
 public:
  __device__ explicit Weighing(const BackwardParams& params)
      : params_(params),
        factor_((tilted()   ? 1.0f
                 : capped() ? params.softcap
                            : params.scale) *
                kLog2E) {}

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

  // By a soft cap: scores become the hyperbolic tangent of what it makes of them, by exponentials: the hardware's
  // is exact to 2^-11 only.
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
      float maximum[2], rest[2];
      numbers.lse(r, maximum, rest);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = Numbers::which(j);
        rS[r + j] = exp2_fast(fmaf(factor_, rS[r + j] - maximum[i], -rest[i]));
      }
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
      float maximum[2], rest[2];
      numbers.lse(r, maximum, rest);
#pragma unroll
      for (int j = r; j < r + 4; ++j) {
        const int i = Numbers::which(j);
        const float capped = fmaf(log2_fast(rS[j]) + rest[i], inverse, maximum[i]);
        rdP[j] = rS[j] == 0.0f ? 0.0f : rdP[j] * fmaf(-capped, capped, 1.0f);
      }
    }
  }

 private:
  const BackwardParams& params_;
  const float factor_;
};

}  // namespace pallas_attn::attention::sm90::backward
