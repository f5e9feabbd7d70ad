// The third warpgroup over chosen tokens: each of its warps copies 16 of a tile's 64 rows, as they are.
//
// A row is one copy of the engine, sent for by the lane that knows it; nobody waits for it but who multiplies
// with it. The engine cannot write zeros, so where there is no row the warp does.
#pragma once

#include "mla/sm90/sparse/listed_rows.h"
#include "mla/sm90/transposed/query.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90::transposed {

// Which tokens of a tile are there, a bit each.
template <int kRows>
struct ChosenPlan : TransposedPlan<kRows> {
  uint64_t held[TransposedPlan<kRows>::kStages];
};
static_assert(sizeof(ChosenPlan<64>) <= kSmemLimit && sizeof(ChosenPlan<32>) <= kSmemLimit);

template <typename Plan>
class Gatherer : ListedRows<kTokenBytes> {
 public:
  // One lane of each tells of its rows' bytes.
  static constexpr int kWarps = kWarpgroupWarps, kWriters = kWarps;

  __device__ Gatherer(const SparseParams& params, Plan& smem, int warp)
      : ListedRows<kTokenBytes>(params, warp), smem_(smem) {}

  __device__ void work_through(int part) {
    walk(
        part,
        [&](int token) {
          if (warp_ == 0) prefetch_query<Plan::kRows>(params_, place_of_block(0), token, lane_);
        },
        [&](const PageRun& run) { gather(run); });
  }

 private:
  __device__ __forceinline__ void gather(const PageRun& run) {
    int row = find_rows(run, run.page_begin);
    fetch_id(run.request, run.page_begin + 1);
#pragma unroll 1
    for (int tile = run.page_begin; tile < run.page_end; ++tile) {
      ptx::mbarrier_wait(smem_.page_ring.empty[stage_], phases_.empty(stage_));
      tell_held(smem_, stage_, row);
      copy_rows(row);
      // Behind the copies, or a run's first ones would wait for the second tile's ids.
      row = find_rows(run, tile + 1);
      fetch_id(run.request, tile + 2);
      phases_.advance(stage_);
      stage_ = Plan::next_stage(stage_);
    }
  }

  __device__ __forceinline__ void copy_rows(int own_row) {
    constexpr uint32_t kAllTokens = (1u << kWarpTokens) - 1;
    uint64_t* full = smem_.page_ring.full[stage_];
    char* rows = smem_.pages[stage_] + warp_ * kWarpTokens * kTokenBytes;
    const uint32_t held = __ballot_sync(0xffffffff, own_row >= 0) & kAllTokens;
    if (held != kAllTokens) {
#pragma unroll 1
      for (int token = 0; token < kWarpTokens; ++token) {
        if (!(held >> token & 1)) clear_tokens(rows + token * kTokenBytes, 1, lane_);
      }
      ptx::fence_async_shared();
      __syncwarp();
    }
    if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(full, __popc(held) * kTokenBytes);
    __syncwarp();
    if (held >> lane_ & 1) ptx::bulk_load(rows + lane_ * kTokenBytes, row_at(own_row), kTokenBytes, full);
    __syncwarp();
  }

  Plan& smem_;
  int stage_ = 0;
  Phases<Plan::kStages> phases_;
};

}  // namespace pallas_attn::mla::sm90::transposed
