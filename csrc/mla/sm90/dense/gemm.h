// The two matrix products of a page: scores = Q K^T by the page's owner, and half of P V by each warpgroup.
#pragma once

#include "mla/sm90/dense/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"

namespace pallas_attn::mla::sm90 {

constexpr int kStepDims = 16;  // what one wgmma sums over
constexpr int kStepsPerPiece = kPieceDims / kStepDims;
constexpr int kTokenSteps = kTileTokens / kStepDims;

constexpr int kSharedQuerySteps = kQueryDim / kStepDims - kQueryRegisterSteps;

// The last steps of the query as A operands.
using QueryRegisters = uint32_t[kQueryRegisterSteps][4];

// An A operand of 16 columns in a 64 x 64 piece: where this lane's row of 16 bytes is. Lane l addresses row l
// % 8 of matrix l / 8; matrices 0, 1 are rows 0-7 and 8-15 of columns 0-7, 2 and 3 of columns 8-15.
__device__ __forceinline__ uint32_t operand_address(const SmemPlan::Piece& piece, int warp, int lane,
                                                    int step) {
  const int row = warp * 16 + (lane & 15);
  const int chunk = step * 2 + lane / 16;
  return ptx::shared_address(piece[row]) + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ void load_query_registers(QueryRegisters& rQ, const SmemPlan& smem, int warp,
                                                     int lane) {
#pragma unroll
  for (int i = 0; i < kQueryRegisterSteps; ++i) {
    const int step = kSharedQuerySteps + i;
    const SmemPlan::Piece& piece = smem.sQ[step / kStepsPerPiece];
    ptx::load_matrix_x4(operand_address(piece, warp, lane, step % kStepsPerPiece), rQ[i]);
  }
}

// Issues the products of pieces [kFirst, kFirst + kCount), each as soon as its copy has landed.
template <typename Element, int kFirst, int kCount>
__device__ __forceinline__ void issue_scores(float (&rS)[kScoreRegisters], const QueryRegisters& rQ,
                                             SmemPlan& smem, int buffer, uint32_t full_parity,
                                             bool accumulate) {
  const uint64_t query = ptx::wgmma_descriptor(smem.sQ, 0);
  const uint64_t key = ptx::wgmma_descriptor(smem.sK[buffer], 0);
#pragma unroll
  for (int piece = kFirst; piece < kFirst + kCount; ++piece) {
    ptx::mbarrier_wait(&smem.kv_full[buffer][piece], full_parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsPerPiece; ++step) {
      const uint32_t offset = piece * kPieceBytes + step * kStepDims * 2;
      const uint64_t step_key = ptx::advance_descriptor(key, offset);
      const bool add = accumulate || piece > kFirst || step > 0;
      const int in_registers = piece * kStepsPerPiece + step - kSharedQuerySteps;
      if (in_registers >= 0) {
        ptx::wgmma_m64n64k16_a_registers<Element>(rS, rQ[max(in_registers, 0)], step_key, add);
      } else {
        ptx::wgmma_m64n64k16_a_shared<Element>(rS, ptx::advance_descriptor(query, offset), step_key, add);
      }
    }
  }
}

// Value piece p of a half lies kPieceBytes after piece p - 1, and 16 tokens span two swizzle atoms.
__device__ __forceinline__ uint64_t value_descriptor(SmemPlan& smem, int buffer, int side) {
  return ptx::wgmma_descriptor(smem.sK[buffer][side * kHalfPieces], kPieceBytes);
}

constexpr uint32_t kTokenStepBytes = kStepDims * kRowBytes;

// rO += P V with this warpgroup's own probabilities; or rO = P V.
template <typename Element>
__device__ __forceinline__ void issue_values_own(float (&rO)[kOutRegisters],
                                                 const uint32_t (&rP)[kTokenSteps][4], SmemPlan& smem,
                                                 int buffer, int side, bool accumulate) {
  const uint64_t value = value_descriptor(smem, buffer, side);
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    ptx::wgmma_m64n256k16_a_registers<Element>(
        rO, rP[step], ptx::advance_descriptor(value, step * kTokenStepBytes), accumulate || step > 0);
  }
}

// rO += P V with the probabilities the other warpgroup left in shared memory.
template <typename Element>
__device__ __forceinline__ void issue_values_shared(float (&rO)[kOutRegisters], SmemPlan& smem, int buffer,
                                                    int side) {
  const uint64_t value = value_descriptor(smem, buffer, side);
  const uint64_t probabilities = ptx::wgmma_descriptor(smem.sP(buffer), 0);
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    ptx::wgmma_m64n256k16_a_shared<Element>(rO, ptx::advance_descriptor(probabilities, step * kStepDims * 2),
                                            ptx::advance_descriptor(value, step * kTokenStepBytes), true);
  }
}

}  // namespace pallas_attn::mla::sm90
