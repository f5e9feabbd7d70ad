// Online softmax on the accumulator layout of wgmma.
//
// A thread holds two rows, `quad_row` and `quad_row + 8` of its warp's 16; the four lanes of a quad share
// them. Scores are kept in base 2: s2 = s * scale * log2(e).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/math.h"
#include "mla/element_traits.h"
#include "mla/sm90/dense/gemm.h"
#include "mla/sm90/dense/smem_plan.h"

namespace pallas_attn::mla::sm90 {

constexpr int kRowsPerThread = 2;

// Which of the tile's rows and columns a thread holds.
struct FragmentPosition {
  int warp;     // in the warpgroup
  int quad;     // row in the 8-row group
  int in_quad;  // which two columns of 8

  __device__ explicit FragmentPosition(int thread)
      : warp(thread / 32), quad(thread % 32 / 4), in_quad(thread % 4) {}

  __device__ int row(int i) const { return warp * 16 + i * 8 + quad; }
  // Register r of a fragment: its row (0 or 1) and its column.
  static __device__ constexpr int row_of(int r) { return r / 2 % 2; }
  __device__ int column(int r) const { return r / 4 * 8 + in_quad * 2 + r % 2; }
};

template <typename Op>
__device__ __forceinline__ float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 1));
  return op(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// What one warpgroup knows of its two rows.
struct RowState {
  float maximum[kRowsPerThread];  // in base 2, scaled
  float sum[kRowsPerThread];      // of this thread's columns of this warpgroup's pages

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      maximum[i] = kNoMaximum;
      sum[i] = 0.0f;
    }
  }
};

// Keys a row may see: [0, visible[i]).
__device__ __forceinline__ void mask_scores(float (&rS)[kScoreRegisters], const FragmentPosition& at,
                                            int first_token, const int (&visible)[kRowsPerThread]) {
#pragma unroll
  for (int r = 0; r < kScoreRegisters; ++r) {
    if (first_token + at.column(r) >= visible[FragmentPosition::row_of(r)]) rS[r] = -INFINITY;
  }
}

// Turns scores into probabilities (packed as the A operand of the value product), moves the running maximum
// and sum, and says by what the rows' earlier results must be multiplied.
template <typename Element>
__device__ __forceinline__ void softmax_page(float (&rS)[kScoreRegisters], float scale_log2, RowState& state,
                                             float (&rescale)[kRowsPerThread],
                                             uint32_t (&rP)[kTokenSteps][4]) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    float top = -INFINITY;
#pragma unroll
    for (int r = 0; r < kScoreRegisters; ++r) {
      if (FragmentPosition::row_of(r) == i) top = fmaxf(top, rS[r]);
    }
    top = quad_reduce(top, [](float a, float b) { return fmaxf(a, b); }) * scale_log2;
    const float before = state.maximum[i];
    const float after = top > before + kRescaleSlack ? top : before;
    state.maximum[i] = after;
    // Nothing to rescale yet: one, so that nobody does.
    rescale[i] = before == kNoMaximum ? 1.0f : exp2_fast(before - after);
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kScoreRegisters; ++r) {
      if (FragmentPosition::row_of(r) == i) {
        rS[r] = exp2_fast(fmaf(rS[r], scale_log2, -after));
        sum += rS[r];
      }
    }
    state.sum[i] = fmaf(state.sum[i], rescale[i], sum);
  }
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rP[step][j] = ElementTraits<Element>::pack(rS[step * 8 + j * 2], rS[step * 8 + j * 2 + 1]);
  }
}

// Multiplies the output by the rows' factors; almost always they are all one and nothing happens.
__device__ __forceinline__ void rescale_out(float (&rO)[kOutRegisters],
                                            const float (&rescale)[kRowsPerThread]) {
  if (__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
    for (int r = 0; r < kOutRegisters; ++r) rO[r] *= rescale[FragmentPosition::row_of(r)];
  }
}

// Publishes a page's probabilities, maximum and factors for the other warpgroup. The caller announces.
__device__ __forceinline__ void publish_page(SmemPlan& smem, const FragmentPosition& at, int lane, int buffer,
                                             const uint32_t (&rP)[kTokenSteps][4], const RowState& state,
                                             const float (&rescale)[kRowsPerThread]) {
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    ptx::store_matrix_x4(operand_address(smem.sP(buffer), at.warp, lane, step), rP[step][0], rP[step][1],
                         rP[step][2], rP[step][3]);
  }
  if (at.in_quad == 0) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      smem.running_max[at.row(i)] = state.maximum[i];
      smem.rescale[buffer][at.row(i)] = rescale[i];
    }
  }
  ptx::fence_async_shared();
}

// Takes over what the other warpgroup published.
__device__ __forceinline__ void adopt_page(const SmemPlan& smem, const FragmentPosition& at, int buffer,
                                           RowState& state, float (&rescale)[kRowsPerThread]) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    state.maximum[i] = smem.running_max[at.row(i)];
    rescale[i] = smem.rescale[buffer][at.row(i)];
    state.sum[i] *= rescale[i];
  }
}

// Zeroes the value rows of slots beyond the sequence's end: their probability is zero, but zero times NaN is
// not.
__device__ __forceinline__ void clear_tail(SmemPlan& smem, int buffer, int valid_tokens, int thread) {
  const int chunks = (kTileTokens - valid_tokens) * (kRowBytes / sizeof(uint4));
#pragma unroll 1
  for (int piece = 0; piece < kLatentPieces; ++piece) {
    uint4* rows = reinterpret_cast<uint4*>(smem.sK[buffer][piece][valid_tokens]);
    for (int i = thread; i < chunks; i += kSideThreads) rows[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
}

}  // namespace pallas_attn::mla::sm90
