// A math warpgroup's products with a key tile and with its values, begun and not waited for.
#pragma once

#include <cstdint>

#include "attention/sm90/forward/smem_plan.h"
#include "ptx/wgmma.h"

namespace pallas_attn::attention::sm90 {

// rS = Q K^T of the warpgroup's rows of the queries, whose pieces are kRows rows apart.
template <typename Element, typename Shape, int kCount>
__device__ __forceinline__ void multiply_keys(float (&rS)[kCount],
                                              const SwizzledPiece<kFragmentRows>& first_piece,
                                              const typename SmemPlan<Shape>::Keys& keys) {
  using Keys = typename SmemPlan<Shape>::Keys;
  const uint64_t query = ptx::uniform_descriptor(ptx::wgmma_descriptor(first_piece, 0));
  const uint64_t key = ptx::uniform_descriptor(ptx::wgmma_descriptor(&keys, 0, Keys::kEightStride));
  ptx::wgmma_claim(rS);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Shape::kDim / kStepDims; ++step) {
    const uint32_t within = step % kStepsPerPiece * kStepDims * 2;
    const uint32_t piece = step / kStepsPerPiece;
    const uint64_t step_query = ptx::advance_descriptor(query, piece * (Shape::kRows * kRowBytes) + within);
    const uint64_t step_key = ptx::advance_descriptor(key, piece * Keys::kPieceStride + within);
    ptx::wgmma_k16<Element, ptx::kKMajor>(rS, step_query, step_key, step > 0);
  }
  ptx::wgmma_commit();
}

// rO += P V, or at first rO = P V.
template <typename Element, typename Shape, int kCount, int kSteps>
__device__ __forceinline__ void multiply_values(float (&rO)[kCount], uint32_t (&rP)[kSteps][4],
                                                const typename SmemPlan<Shape>::Values& values, bool first) {
  using Values = typename SmemPlan<Shape>::Values;
  const uint64_t value =
      ptx::uniform_descriptor(ptx::wgmma_descriptor(&values, Values::kPieceStride, Values::kEightStride));
  ptx::wgmma_touch(rO);
  ptx::wgmma_touch(rP);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto& weights = static_cast<const uint32_t (&)[4]>(rP[step]);
    const uint64_t step_value = ptx::advance_descriptor(value, step * (kStepDims / 8) * Values::kEightStride);
    if constexpr (Shape::kThreads == kManyThreads && Shape::kValueDim == 256) {
      // An instruction has no more registers than a thread begins with, here 128.
      constexpr int kHalf = kCount / 2;
      const uint64_t other =
          ptx::advance_descriptor(step_value, Shape::kValuePieces / 2 * Values::kPieceStride);
      auto& left = reinterpret_cast<float (&)[kHalf]>(rO[0]);
      auto& right = reinterpret_cast<float (&)[kHalf]>(rO[kHalf]);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(left, weights, step_value, !first || step > 0);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(right, weights, other, !first || step > 0);
    } else {
      ptx::wgmma_k16<Element, ptx::kMNMajor>(rO, weights, step_value, !first || step > 0);
    }
  }
  ptx::wgmma_commit();
}

}  // namespace pallas_attn::attention::sm90
