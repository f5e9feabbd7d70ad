// Output of a page: columns of the value x query rows, the columns' bytes from registers.
#pragma once

#include "mla/sm90/transposed/scores.h"

namespace pallas_attn::mla::sm90::transposed {

// Of one step of 16 tokens, a thread has tokens 2 p, 2 p + 1, 2 p + 8 and 2 p + 9, eight columns of each: of
// those that a half warp loads at once, tokens are 8 banks apart and columns 2, so they never meet.
constexpr int kTokensOfStep = 4;
__device__ __forceinline__ int token_of_step(int step, int i, const Place& at) {
  return step * kStepDims + at.pair * 2 + i % 2 + i / 2 * 8;
}

struct ColumnBytes {
  uint2 of_token[kTokensOfStep];
};

__device__ __forceinline__ ColumnBytes load_columns(const char* page, const Place& at, int step) {
  ColumnBytes columns;
#pragma unroll
  for (int i = 0; i < kTokensOfStep; ++i) {
    columns.of_token[i] =
        *reinterpret_cast<const uint2*>(page + token_of_step(step, i, at) * kTokenBytes + at.column());
  }
  return columns;
}

// The A operands of a step: tile c has columns 2 c and 2 c + 1 of the thread's eight as its rows.
__device__ __forceinline__ void value_fragments(const ColumnBytes& columns, const uint2& scales,
                                                uint32_t (&fragments)[kColumnTiles][4]) {
#pragma unroll
  for (int later = 0; later < 2; ++later) {
    const uint2 even = columns.of_token[later * 2], odd = columns.of_token[later * 2 + 1];
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      // Two columns, the two tokens of each side by side.
      const FourHalves halves = halves_of(
          __byte_perm(tile < 2 ? even.x : even.y, tile < 2 ? odd.x : odd.y, tile % 2 == 0 ? 0x5140 : 0x7362));
      const __half2 scale = as_halves(later == 0 ? scales.x : scales.y);
      fragments[tile][later * 2] = as_word(__hmul2(halves.low, scale));
      fragments[tile][later * 2 + 1] = as_word(__hmul2(halves.high, scale));
    }
  }
}

// rO += V^T P, in the run's unit: all products are sent for, and the last ones not waited for. Calls read()
// when the page's bytes are in registers.
template <typename Plan, int kAccumulators, typename Read>
__device__ __forceinline__ void multiply_values(float (&rO)[kColumnTiles][kAccumulators], const Plan& smem,
                                                int page_owner, int stage, const Place& at, Read read) {
  constexpr int kSteps = kPageTokens / kStepDims;
  const char* page = smem.pages[stage];
  const uint64_t probabilities = ptx::wgmma_descriptor(smem.probabilities[page_owner], 0);
  const __half* scales = smem.token_scale[page_owner][at.block()];
  uint32_t fragments[2][kColumnTiles][4];
#pragma unroll
  for (int tile = 0; tile < kColumnTiles; ++tile) ptx::wgmma_touch(rO[tile]);
  ColumnBytes columns = load_columns(page, at, 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t (&own)[kColumnTiles][4] = fragments[step % 2];
    const auto step_scales =
        *reinterpret_cast<const uint2*>(scales + step * kStepDims + at.pair * kTokensOfStep);
    value_fragments(columns, step_scales, own);
    if (step + 1 < kSteps) columns = load_columns(page, at, step + 1);
    ptx::wgmma_touch(own);
    if (step + 1 == kSteps) read();
    ptx::wgmma_fence();
    const uint64_t operand = ptx::advance_descriptor(probabilities, step * kStepDims * 2);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const uint32_t (&fragment)[4] = own[tile];
      ptx::wgmma_k16<__half, ptx::kKMajor>(rO[tile], fragment, operand, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
  }
}

template <int kAccumulators>
__device__ __forceinline__ void finish_values(float (&rO)[kColumnTiles][kAccumulators]) {
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int tile = 0; tile < kColumnTiles; ++tile) ptx::wgmma_touch(rO[tile]);
}

}  // namespace pallas_attn::mla::sm90::transposed
