// Gradients from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/ordered.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// 64 rows of an array of heads, each times its factor; those from `rows` on are not there, nor are columns
// from `dim` on.
template <typename Element, int kCount>
__device__ __forceinline__ void store_rows(void* array, int64_t place, int64_t token_stride, int rows,
                                           int dim, const float (&d)[kCount], float factor,
                                           const FragmentPosition& at) {
  const int column = at.in_quad * 8;
  auto* const to = static_cast<uint16_t*>(array) + place + column;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {
      const uint4 eight = neighbours<Element>(d, i, group, factor, at.in_quad);
      if (row < rows && group * 32 + column < dim) {
        *reinterpret_cast<uint4*>(to + row * token_stride + group * 32) = eight;
      }
    }
  }
}

// What a thread has of a query tile's gradient, in a slot: whoever adds to it has the same of it, so each
// thread's numbers lie as they do in its registers, four at a time, those of a warp side by side.
template <typename Shape, int kCount>
class SlotSums {
 public:
  static constexpr int kFloats = Shape::kQueries * Shape::kDim;
  static_assert(kFloats == kCount * Shape::kConsumerThreads);

  __device__ __forceinline__ SlotSums(float* sums, int slot, int thread)
      : own_(reinterpret_cast<float4*>(sums + int64_t{slot} * kFloats) + thread) {}

  __device__ __forceinline__ void put(const float (&d)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) own_[j * Shape::kConsumerThreads] = four(d, j);
  }
  __device__ __forceinline__ void add(const float (&d)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      ptx::add_in_memory(own_ + j * Shape::kConsumerThreads, four(d, j));
    }
  }
  // Adds what is there to d.
  __device__ __forceinline__ void take(float (&d)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float4 v = __ldcg(own_ + j * Shape::kConsumerThreads);
      d[j * 4] += v.x, d[j * 4 + 1] += v.y, d[j * 4 + 2] += v.z, d[j * 4 + 3] += v.w;
      // Two loads in flight: there are no registers for more.
      if (j % 2 == 1) __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ float4 four(const float (&d)[kCount], int j) {
    return make_float4(d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]);
  }

  float4* own_;
};

}  // namespace pallas_attn::attention::sm90::backward
