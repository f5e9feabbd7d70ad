// What the sparse kernels do differently from the dense one: where a tile's tokens lie in the pool, which of
// them are there, and the largest logit as a result. A tile is what a page is to the dense kernel: 64 ids.
#pragma once

#include <cmath>
#include <cstdint>

#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/store.h"
#include "mla/sm90/sparse/smem_plan.h"
#include "mla/sparse_params.h"

namespace pallas_attn::mla::sm90 {

// The kernels are given SparseParams, and what they share with the dense one hands them on by their base.
__device__ __forceinline__ const SparseParams& sparse(const DecodeParams& params) {
  return static_cast<const SparseParams&>(params);
}

// A query token's list of ids, as the walker sees it.
struct TokenLists {
  static __device__ __forceinline__ int length(const DecodeParams& params, int token) {
    return __ldg(params.seq_lens + token);
  }
  static __device__ __forceinline__ int64_t capacity(const DecodeParams& params) {
    return sparse(params).topk;
  }
};

// The same for the dense kernel's math warpgroups. `Registers` is how those are shared out (config.h).
template <typename Registers, int kClusterCtas = 1>
struct ChosenIds : TokenLists {
  using Budget = Registers;
  // In a fence the writers would wait for all that they have sent for since.
  static constexpr bool kUnfenced = true;
  // That have the same tiles, of other heads, and write them for each other.
  static constexpr int kCtas = kClusterCtas;
};

// In the place of a row: there is none, or there should be one.
constexpr int kNoRow = -1, kUnusable = -2;

// Where number `position` of a token's ids leads, of which `listed` count; the id has been read, if there is
// one.
__device__ __forceinline__ int find_row(const SparseParams& params, int token, int id, int position,
                                        int listed) {
  if (position >= listed || id == -1) return kNoRow;
  bool inside = static_cast<unsigned>(id) < static_cast<unsigned>(params.num_rows);
  int row = id;
  if (params.page_size > 0) {
    const unsigned page_size = params.page_size;
    // The quotient, or one less.
    unsigned column = __umulhi(id, params.page_reciprocal), slot = id - column * page_size;
    if (slot >= page_size) ++column, slot -= page_size;
    const bool in_table = id >= 0 && column < static_cast<unsigned>(params.table_columns);
    const int64_t table = static_cast<int64_t>(token / params.tokens_a_table) * params.table_columns;
    const unsigned page = in_table ? __ldg(params.block_tables + table + column) : ~0u;
    inside = page < static_cast<unsigned>(params.num_pages);
    row = static_cast<int>(page * page_size + slot);
  }
  if (inside) return row;
  return params.skip_all_outside ? kNoRow : kUnusable;
}

// Tokens that are not there have been read as zeros.
struct HeldTokens {
  static constexpr bool kHoldsTail = false;
  static constexpr bool kReportsPeak = true;

  static __device__ __forceinline__ void hide(float (&rS)[kScoreRegisters], const FragmentPosition& at,
                                              const DecodeParams&, const SmemPlan& smem, Parity buffer,
                                              const PageRun&, int, int) {
    const uint64_t held = static_cast<const SparsePlan&>(smem).held[buffer];
    if (!__any_sync(0xffffffff, held != ~uint64_t{0})) return;
    const uint64_t from_quad = held >> (at.in_quad * 2);
#pragma unroll
    for (int r = 0; r < kScoreRegisters; ++r) {
      if (!(from_quad >> (r / 4 * 8 + r % 2) & 1)) rS[r] = -INFINITY;
    }
  }

  // The two warpgroups have seen every second tile each.
  static __device__ __forceinline__ void leave_peak(SmemPlan& smem, int run_parity, Parity own,
                                                    const FragmentPosition& at, const RowState& state) {
    if (at.in_quad != 0) return;
    auto& peak = static_cast<SparsePlan&>(smem).peak[run_parity][own];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) peak[at.row(i)] = state.peak[i];
  }

  static __device__ __forceinline__ void report_peak(const DecodeParams& params, const SmemPlan& smem,
                                                     int run_parity, const PageRun& run,
                                                     const OutputPlace& place, const FragmentPosition& at,
                                                     const RowState& state) {
    float* max_logits = sparse(params).max_logits;
    if (max_logits == nullptr || place.half != kLow || at.in_quad != 0) return;
    const auto& peak = static_cast<const SparsePlan&>(smem).peak[run_parity];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = at.row(i);
      if (row >= place.rows_left(params)) continue;
      const float highest = fmaxf(peak[kEven][row], peak[kOdd][row]);
      max_logits[place.row(params, run.request) + row] =
          std::isnan(state.sum[i]) ? NAN : highest * params.scale;
    }
  }
};

}  // namespace pallas_attn::mla::sm90
