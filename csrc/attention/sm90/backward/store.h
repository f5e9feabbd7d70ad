// Gradients from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/ordered.h"
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

// What a thread has of a query tile's gradient, in memory, and of what is counted of its rows.
//
// Whoever adds to a tile has the same of it. So where all of its rows are the sequence's, each thread's
// numbers lie as they do in its registers, four at a time, those of a warp side by side. Else rows lie apart:
// some are another sequence's.
template <typename Shape>
class Sums {
 public:
  static constexpr int kCount = accumulators(Shape::kOwnDims);

  // `row`: the tile's first, among all rows of all heads.
  template <typename Has>
  __device__ __forceinline__ Sums(const BackwardParams& params, int64_t row, bool whole, int warpgroup,
                                  int thread, const FragmentPosition& at, Has has)
      : counts_(params.counts + row * Shape::kMath + warpgroup),
        sums_(params.sums + row * Shape::kDim +
              (whole ? (warpgroup * kWarpgroupThreads + thread) * 4
                     : warpgroup * Shape::kOwnDims + at.in_quad * 2)),
        whole_(whole),
        at_(at) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) has_[i] = whole || has(at.row(i));
  }

  __device__ __forceinline__ void put(const float (&d)[kCount], const float (&counted)[4]) const {
    visit(d, counted, [](auto* to, auto v) { *to = v; });
  }
  __device__ __forceinline__ void add(const float (&d)[kCount], const float (&counted)[4]) const {
    visit(d, counted, [](auto* to, auto v) { ptx::add_in_memory(to, v); });
  }
  // Adds what is there.
  __device__ __forceinline__ void take(float (&d)[kCount], float (&counted)[4]) const {
    if (whole_) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const float4 v = __ldcg(four(j));
        d[j * 4] += v.x, d[j * 4 + 1] += v.y, d[j * 4 + 2] += v.z, d[j * 4 + 3] += v.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!has_[i]) continue;
      counted[i * 2] += __ldcg(count(i));
      if (whole_) continue;
#pragma unroll
      for (int group = 0; group < kCount / 4; ++group) {
        const float2 v = __ldcg(pair(i, group));
        d[group * 4 + i * 2] += v.x, d[group * 4 + i * 2 + 1] += v.y;
      }
    }
  }

 private:
  __device__ __forceinline__ float4* four(int j) const {
    return reinterpret_cast<float4*>(sums_ + j * 4 * Shape::kConsumerThreads);
  }
  __device__ __forceinline__ float2* pair(int i, int group) const {
    return reinterpret_cast<float2*>(sums_ + at_.row(i) * Shape::kDim + group * 8);
  }
  __device__ __forceinline__ float* count(int i) const { return counts_ + at_.row(i) * Shape::kMath; }
  template <typename Visit>
  __device__ __forceinline__ void visit(const float (&d)[kCount], const float (&counted)[4],
                                        Visit visit) const {
    if (whole_) {
#pragma unroll
      for (int j = 0; j < kCount; j += 4) visit(four(j / 4), make_float4(d[j], d[j + 1], d[j + 2], d[j + 3]));
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!has_[i]) continue;
      if (at_.in_quad == 0) visit(count(i), counted[i * 2]);
      if (whole_) continue;
#pragma unroll
      for (int group = 0; group < kCount / 4; ++group) {
        visit(pair(i, group), make_float2(d[group * 4 + i * 2], d[group * 4 + i * 2 + 1]));
      }
    }
  }

  float* const counts_;
  float* const sums_;
  const bool whole_;
  const FragmentPosition& at_;
  bool has_[kRowsPerThread];
};

}  // namespace pallas_attn::attention::sm90::backward
