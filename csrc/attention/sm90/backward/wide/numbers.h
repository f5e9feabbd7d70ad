// What a step needs of its queries: log-sum-exp in two parts, and delta. Queries are the columns of a
// fragment where keys are held, else its rows; a thread has two of four neighbouring registers.
#pragma once

#include "attention/sm90/backward/wide/smem_plan.h"

namespace pallas_attn::attention::sm90::backward::wide {

// Of registers r to r + 3: the two numbers, and which of them is register j's.
class OfColumns {
 public:
  __device__ OfColumns(const Rows<kMet>& rows, const FragmentPosition& at)
      : rows_(rows), in_quad_(at.in_quad) {}

  static __device__ constexpr int which(int j) { return j % 2; }
  __device__ __forceinline__ void lse(int r, float (&maximum)[2], float (&rest)[2]) const {
    const float4 lse = *reinterpret_cast<const float4*>(rows_.lse[r + in_quad_]);
    maximum[0] = lse.x, maximum[1] = lse.y, rest[0] = lse.z, rest[1] = lse.w;
  }
  __device__ __forceinline__ void delta(int r, float (&delta)[2]) const {
    const float2 d = *reinterpret_cast<const float2*>(rows_.delta[r / 8 * 4 + in_quad_] + r % 8 / 2);
    delta[0] = d.x, delta[1] = d.y;
  }

 private:
  const Rows<kMet>& rows_;
  const int in_quad_;
};

class OfRows {
 public:
  template <int kDim>
  __device__ OfRows(const HeldRows<kDim>& rows, int first_row, const FragmentPosition& at) {
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

}  // namespace pallas_attn::attention::sm90::backward::wide
