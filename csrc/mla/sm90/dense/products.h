// The two matrix products of a page: scores = Q K^T by the page's owner, and half of P V by each warpgroup.
#pragma once

#include "mla/sm90/dense/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"

namespace pallas_attn::mla::sm90 {

constexpr int kTokenSteps = kPageTokens / kStepDims;
constexpr int kQuerySteps = kQueryDim / kStepDims;

// The last steps of the query as A operands.
template <int kSteps>
struct QueryRegisters {
  uint32_t step[kSteps == 0 ? 1 : kSteps][4];
};

template <int kSteps>
__device__ __forceinline__ void load_query_registers(QueryRegisters<kSteps>& rQ, const SmemPlan& smem,
                                                     int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = kQuerySteps - kSteps + i;
    const SmemPlan::Piece& piece = smem.sQ[step / kStepsPerPiece];
    ptx::load_matrix_x4(matrix_address(piece, warp, lane, step % kStepsPerPiece), rQ.step[i]);
  }
}

// Issues the products of pieces [kFirst, kFirst + kCount), each as soon as it is there.
// `kUnfenced`: they were written by threads that leave the fence to who reads.
template <typename Element, bool kUnfenced, int kFirst, int kCount, int kRegisterSteps>
__device__ __forceinline__ void issue_scores(float (&rS)[kScoreRegisters],
                                             const QueryRegisters<kRegisterSteps>& rQ, SmemPlan& smem,
                                             int buffer, uint32_t full_parity, bool accumulate) {
  const uint64_t query = ptx::wgmma_descriptor(smem.sQ, 0);
  const uint64_t key = ptx::wgmma_descriptor(smem.sK[buffer], 0);
#pragma unroll
  for (int piece = kFirst; piece < kFirst + kCount; ++piece) {
    ptx::mbarrier_wait(&smem.pages.full[buffer][piece], full_parity);
    if constexpr (kUnfenced) ptx::fence_async_shared();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsPerPiece; ++step) {
      const uint32_t offset = piece * kPieceBytes + step * kStepDims * 2;
      const uint64_t step_key = ptx::advance_descriptor(key, offset);
      const bool add = accumulate || piece > kFirst || step > 0;
      const int in_registers = piece * kStepsPerPiece + step - (kQuerySteps - kRegisterSteps);
      if (in_registers >= 0) {
        const uint32_t (&step_query)[4] = rQ.step[max(in_registers, 0)];
        ptx::wgmma_k16<Element, ptx::kKMajor>(rS, step_query, step_key, add);
      } else {
        const uint64_t step_query = ptx::advance_descriptor(query, offset);
        ptx::wgmma_k16<Element, ptx::kKMajor>(rS, step_query, step_key, add);
      }
    }
  }
}

// Value piece p of a half lies kPieceBytes after piece p - 1, and 16 tokens span two swizzle atoms.
constexpr uint32_t kTokenStepBytes = kStepDims * kRowBytes;
__device__ __forceinline__ uint64_t value_descriptor(SmemPlan& smem, int buffer, Half half) {
  return ptx::wgmma_descriptor(smem.sK[buffer][first_piece(half)], kPieceBytes);
}

// rO += P V with this warpgroup's own probabilities; or rO = P V.
template <typename Element>
__device__ __forceinline__ void issue_values_own(float (&rO)[kOutRegisters],
                                                 const uint32_t (&rP)[kTokenSteps][4], SmemPlan& smem,
                                                 int buffer, Half half, bool accumulate) {
  const uint64_t value = value_descriptor(smem, buffer, half);
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    ptx::wgmma_k16<Element, ptx::kMNMajor>(
        rO, rP[step], ptx::advance_descriptor(value, step * kTokenStepBytes), accumulate || step > 0);
  }
}

// rO += P V with probabilities that lie in shared memory; or rO = P V.
template <typename Element>
__device__ __forceinline__ void issue_values_shared(float (&rO)[kOutRegisters], SmemPlan& smem, int buffer,
                                                    Half half, bool accumulate) {
  const uint64_t value = value_descriptor(smem, buffer, half);
  const uint64_t probabilities = ptx::wgmma_descriptor(smem.sP(buffer), 0);
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    const uint64_t step_probabilities = ptx::advance_descriptor(probabilities, step * kStepDims * 2);
    ptx::wgmma_k16<Element, ptx::kMNMajor>(rO, step_probabilities,
                                           ptx::advance_descriptor(value, step * kTokenStepBytes),
                                           accumulate || step > 0);
  }
}

}  // namespace pallas_attn::mla::sm90
