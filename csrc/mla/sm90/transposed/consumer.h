// A math warpgroup: the loop over a run's pages, which both run alike, and its steps.
//
// The warpgroups own pages in turn: even ones of a run the first, odd ones the second. The owner computes a
// page's scores and softmax; then each multiplies the page by its probabilities for its half of the output.
// While one is in its softmax, or converts, the other one's products keep the tensor cores busy.
#pragma once

#include "mla/sm90/transposed/query.h"
#include "mla/sm90/transposed/result.h"
#include "mla/sm90/transposed/values.h"

namespace pallas_attn::mla::sm90::transposed {

// `Tokens` says which there are, and what a row sees (all_tokens.h, chosen_tokens.h).
template <typename Tokens, typename Plan>
class Consumer {
 public:
  __device__ Consumer(const DecodeParams& params, Plan& smem, RunResult<Tokens, Plan>& result,
                      const Place& at)
      : params_(params), smem_(smem), result_(result), at_(at) {
    run_.request = -1;
  }

  // All runs of a part; the last one's result stays in registers. What becomes of it is up to the kernel.
  __device__ __forceinline__ void work_through(int part) {
    RunWalker<typename Tokens::Lengths> walker(params_, part);
    while (!walker.done()) {
      // Its loads travel while the run's result before it is written.
      walker.fetch();
      if (run_.request >= 0) result_.store(false);
      run_ = walker.run();
      begin_run();
      // A step is an own page, and the one before it, which is the other warpgroup's.
      const int pages = run_.num_pages();
      for (int own = at_.owner; own - 1 < pages; own += kOwners) {
        const bool has_own = own < pages, has_others = own > 0;
        const int own_stage = has_others ? Plan::next_stage(stage_) : stage_;
        if (has_own) compute_scores(own, own_stage);
        if (has_others) {
          follow_others();
          multiply(other());
        }
        if (has_own) {
          make_probabilities(own, own_stage);
          announce_probabilities(at_.owner);
          multiply(at_.owner);
        }
      }
      result_.complete();
    }
  }

 private:
  __device__ __forceinline__ int other() const { return 1 - at_.owner; }

  __device__ __forceinline__ void begin_run() {
    const Place at = at_.anew();
    meet_within(at_.owner);  // this warpgroup has read what was there
    if (at.thread() == 0) smem_.run[at_.owner] = run_;
    if (run_.num_pages() > 0) {
      load_query(params_, smem_, place_of_block(at_.owner), run_.request, params_.scale * kLog2E,
                 at.owner * kWarpgroupWarps + at.warp, at.lane);
      ptx::fence_async_shared();
    }
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
      for (float& x : result_.rO[tile]) x = 0.0f;
    }
#pragma unroll
    for (float& x : result_.sums.of_row) x = 0.0f;
    ptx::named_barrier_sync(kQueryReady, kConsumerThreads);
    // Behind the barrier, as the other warpgroup may have been at the run before until then.
    if (at_.owner == 0) {
      reset_run(smem_, at.thread());
      meet_within(at_.owner);
    }
  }

  __device__ __forceinline__ void compute_scores(int index, int stage) {
    const Place at = at_.anew();
    wait_for_page(stage);
    if constexpr (Tokens::kHoldsTail) {
      const int tokens_left = run_.seq_len - (run_.page_begin + index) * kPageTokens;
      if (tokens_left < kPageTokens) clear_tail(stage, tokens_left);
    }
    scales_ = load_scales<Scores<Plan::kRows>::kAddsUp>(smem_.pages[stage], smem_.bad_page[stage] != 0, at);
    multiply_scores(rS_, scales_, smem_, stage, at);
  }

  // Until page and stage are there, which this warpgroup may know already.
  __device__ __forceinline__ void wait_for_page(int stage) {
    ptx::mbarrier_wait(smem_.page_ring.full[stage], phases_.full(stage));
  }

  // The other warpgroup's newest page: its probabilities are there, and the base may have moved.
  __device__ __forceinline__ void follow_others() {
    await_probabilities(other());
    rescale_sums(other());
  }

  // From the own page's scores. As a rule neither base nor unit has to move.
  __device__ __forceinline__ void make_probabilities(int index, int stage) {
    const Place at = at_.anew();
    Tokens::hide(rS_, params_, smem_, run_, run_.page_begin + index, stage, at);
    if (at.thread() == 0) smem_.moved[at_.owner] = false;
    if (store_probabilities(stage, at)) {
      if (at.thread() == 0) smem_.moved[at_.owner] = true;
      move_base(rS_, scales_, smem_, at);
      rescale_sums(at_.owner);
      store_probabilities(stage, at);
    }
#pragma unroll
    for (int i = 0; i < result_.sums.kHeld; ++i) result_.sums.of_row[i] += held_[i];
  }

  // True if any was too large. Behind this they are there for this warpgroup, and for whoever is told.
  __device__ __forceinline__ bool store_probabilities(int stage, const Place& at) {
    const bool above = transposed::store_probabilities(rS_, scales_, held_, smem_, at);
    store_token_scales(smem_, stage, at);
    ptx::fence_async_shared();
    // Asked again, so that the compiler knows it to be uniform.
    return __any_sync(0xffffffff, ptx::named_barrier_any(kWithin + at_.owner, kWarpgroupThreads, above));
  }

  // Slots beyond the sequence's end may hold anything, and the copy engine has left them out. Each warp
  // clears those whose scores it computes.
  __device__ __forceinline__ void clear_tail(int stage, int valid_tokens) {
    const int first = max(at_.warp * kWarpRows, valid_tokens), end = (at_.warp + 1) * kWarpRows;
    clear_tokens(smem_.pages[stage] + first * kTokenBytes, end - first, ptx::lane());
    ptx::fence_async_shared();
    __syncwarp();
  }

  __device__ __forceinline__ void rescale_sums(int owner) {
    if (!__any_sync(0xffffffff, smem_.moved[owner])) return;
    const Place at = at_.anew();
    visit_row_pairs<Plan::kRows>([&](int j) {
      const float2 factor = smem_.rescale[owner].pair(at.row(j));
      result_.sums.of_row[j * 2] *= factor.x;
      result_.sums.of_row[j * 2 + 1] *= factor.y;
    });
  }

  __device__ __forceinline__ void rescale_output(int owner) {
    if (!__any_sync(0xffffffff, smem_.moved[owner])) return;
    const float unit = smem_.unit_rescale[owner];
    const Place at = at_.anew();
    visit_row_pairs<Plan::kRows>([&](int j) {
      const float2 factor = smem_.rescale[owner].pair(at.row(j));
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          result_.rO[tile][j * 4 + i * 2] *= factor.x * unit;
          result_.rO[tile][j * 4 + i * 2 + 1] *= factor.y * unit;
        }
      }
    });
  }

  // The next page of the run.
  __device__ __forceinline__ void multiply(int page_owner) {
    rescale_output(page_owner);
    // The other's page has long landed; this makes its bytes visible here.
    wait_for_page(stage_);
    multiply_values(result_.rO, smem_, page_owner, stage_, at_.anew(),
                    [&] { arrive(&smem_.page_ring.empty[stage_][0]); });
    finish_values(result_.rO);
    phases_.advance(stage_);
    stage_ = Plan::next_stage(stage_);
  }

  // One lane speaks for its warp.
  __device__ __forceinline__ void arrive(uint64_t* barrier) {
    __syncwarp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier);
  }

  const DecodeParams& params_;
  Plan& smem_;
  RunResult<Tokens, Plan>& result_;
  const Place at_;

  PageRun run_;
  int stage_ = 0;  // of the page to be multiplied next
  Phases<Plan::kStages> phases_;
  TokenScales scales_;
  float held_[RowSums<Plan::kRows>::kHeld];  // sums of the own page's probabilities
  Scores<Plan::kRows> rS_;
};

}  // namespace pallas_attn::mla::sm90::transposed
