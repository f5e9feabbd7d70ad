// Products of both forms of the kernel. All of a warp's threads call them; none waits.
#pragma once

#include <cstdint>

#include "ptx/wgmma.h"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90::backward {

// Through a shuffle the compiler knows that a value is the warp's.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
__device__ __forceinline__ uint64_t descriptor(const void* tile, uint32_t leading_bytes) {
  return ptx::uniform_descriptor(ptx::wgmma_descriptor(tile, leading_bytes));
}

// d = rows of a times rows of b, over kDims.
template <typename Element, int kDims, uint32_t kPieceBytesA, uint32_t kPieceBytesB, int kCount>
__device__ __forceinline__ void multiply_rows(float (&d)[kCount], const void* a, const void* b) {
  const uint64_t left = descriptor(a, 0), right = descriptor(b, 0);
  ptx::wgmma_touch(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDims / kStepDims; ++step) {
    const uint32_t piece = step / kStepsPerPiece, within = step % kStepsPerPiece * kStepDims * 2;
    const uint64_t step_left = ptx::advance_descriptor(left, piece * kPieceBytesA + within);
    const uint64_t step_right = ptx::advance_descriptor(right, piece * kPieceBytesB + within);
    ptx::wgmma_k16<Element, ptx::kKMajor>(d, step_left, step_right, step > 0);
  }
  ptx::wgmma_commit();
}

// d += a times b, over b's rows; d = for the first one.
template <typename Element, uint32_t kPieceBytes, int kCount, int kSteps>
__device__ __forceinline__ void add_product(float (&d)[kCount], uint32_t (&a)[kSteps][4], const void* b,
                                            bool first) {
  const uint64_t right = descriptor(b, kPieceBytes);
  ptx::wgmma_touch(d);
  ptx::wgmma_touch(a);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto& weights = static_cast<const uint32_t (&)[4]>(a[step]);
    const uint64_t step_right = ptx::advance_descriptor(right, step * kStepDims * kRowBytes);
    ptx::wgmma_k16<Element, ptx::kMNMajor>(d, weights, step_right, !first || step > 0);
  }
  ptx::wgmma_commit();
}

// The left operand of such a product.
template <typename Element, int kCount, int kSteps>
__device__ __forceinline__ void pack(const float (&d)[kCount], uint32_t (&packed)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    constexpr float kOne[kRowsPerThread] = {1.0f, 1.0f};
    pack_step<Element>(d, step, kOne, packed[step]);
  }
}

}  // namespace pallas_attn::attention::sm90::backward
