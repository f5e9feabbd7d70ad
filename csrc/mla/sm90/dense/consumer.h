// The steps of the two math warpgroups, in the order in which a page comes by them.
//
// The even warpgroup owns even pages (of a run, counted from its first) and the low 256 columns of the
// output; the odd one odd pages and the high columns. The owner of a page computes its scores and softmax;
// both multiply.
#pragma once

#include <cmath>

#include "mla/sm90/dense/named_barriers.h"
#include "mla/sm90/dense/products.h"
#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/store.h"
#include "ptx/cluster.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::mla::sm90 {

template <typename Element, typename Source, typename Mask, Parity kOwn>
class Consumer {
 public:
  __device__ Consumer(const DecodeParams& params, SmemPlan& smem, RunResult& last, int kv_head, int row_tile,
                      int thread)
      : params_(params),
        smem_(smem),
        last_(last),
        state_(last.state),
        rO_(last.rO),
        place_{kv_head, row_tile, kHalf},
        thread_(thread),
        lane_(thread % 32),
        at_(thread),
        scale_log2_(params.scale * kLog2E) {}

 protected:
  using Budget = typename Source::Budget;
  static constexpr Parity kOther = other(kOwn);
  static constexpr Half kHalf = half_of(kOwn);

  // Waits for the run's query. A run without pages has one too, which is given back at once.
  __device__ __forceinline__ void begin_run(const PageRun& run) {
    ptx::mbarrier_wait(smem_.query.full[0], query_phase_.full());
    query_phase_.advance();
    load_query_registers(rQ_, smem_, at_.warp, lane_);
    if (run.num_pages() == 0) release_query();
    state_.reset();
#pragma unroll
    for (int r = 0; r < kOutRegisters; ++r) rO_[r] = 0.0f;
  }

  // Issues the products of query and own page that sum over the pieces [kFirst, kFirst + kCount); the caller
  // commits.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void scores(bool accumulate) {
    if (!accumulate) ptx::wgmma_touch(rS_);
    issue_scores<Element, Source::kUnfenced, kFirst, kCount>(rS_, rQ_, smem_, kOwn, page_phase_.full(),
                                                             accumulate);
  }

  // Until at most `kPending` groups of products are unfinished, those of the scores being among the others.
  template <int kPending>
  __device__ __forceinline__ void wait_scores(bool last_of_run) {
    ptx::wgmma_wait<kPending>();
    page_phase_.advance();
    if (last_of_run) release_query();
    ptx::wgmma_touch(rS_);
  }

  // The own page's scores become probabilities; with everything rare around it.
  __device__ __forceinline__ void probabilities(const PageRun& run, int page,
                                                float (&rescale)[kRowsPerThread]) {
    Mask::hide(rS_, at_, params_, smem_, kOwn, run, page, place_.first_row());
    if constexpr (Mask::kHoldsTail) {
      const int tokens_left = run.seq_len - page * kPageTokens;
      if (tokens_left < kPageTokens) {
        clear_tail(tokens_left);
        ptx::named_barrier_sync(tail_cleared(kOwn), kWarpgroupThreads);
      }
    }
    // A bad page makes every probability NaN.
    const float scale_log2 = smem_.bad_page[kOwn] ? NAN : scale_log2_;
    softmax_step<Element>(rS_, scale_log2, state_, rescale, rP_);
  }

  // Leaves the own page's probabilities, maximum and factors to the other warpgroup.
  __device__ __forceinline__ void publish(const float (&rescale)[kRowsPerThread]) {
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      ptx::store_matrix_x4(matrix_address(smem_.sP(kOwn), at_.warp, lane_, step), rP_[step]);
    }
    if (at_.in_quad == 0) {
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        smem_.running_max[at_.row(i)] = state_.maximum[i];
        smem_.rescale[kOwn][at_.row(i)] = rescale[i];
      }
    }
    ptx::fence_async_shared();
    announce(probabilities_ready(kOwn));
    if constexpr (!Budget::kOwnProbabilities) {
      ptx::named_barrier_sync(own_probabilities(kOwn), kWarpgroupThreads);
    }
  }

  // Starts the product of the own page's probabilities with this warpgroup's half of the page.
  __device__ __forceinline__ void multiply_own(bool accumulate) {
    // It reads registers written above.
    ptx::wgmma_touch(rO_);
    if constexpr (Budget::kOwnProbabilities) {
      ptx::wgmma_touch(rP_);
      ptx::wgmma_fence();
      issue_values_own<Element>(rO_, rP_, smem_, kOwn, kHalf, accumulate);
    } else {
      ptx::wgmma_fence();
      issue_values_shared<Element>(rO_, smem_, kOwn, kHalf, accumulate);
    }
    ptx::wgmma_commit();
  }

  // Waits for the probabilities of the other warpgroup's page, adjusts to its maximum and starts the product
  // with this warpgroup's half of the page.
  __device__ __forceinline__ void multiply_others() {
    await(probabilities_ready(kOther));
    float rescale[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      state_.maximum[i] = smem_.running_max[at_.row(i)];
      rescale[i] = smem_.rescale[kOther][at_.row(i)];
      state_.sum[i] *= rescale[i];
    }
    rescale_rows(rO_, rescale);
    ptx::wgmma_touch(rO_);
    ptx::wgmma_fence();
    issue_values_shared<Element>(rO_, smem_, kOther, kHalf, true);
    ptx::wgmma_commit();
  }

  // Until at most `kPending` groups of products are unfinished, those of values being among the others.
  template <int kPending>
  __device__ __forceinline__ void wait_products() {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_touch(rO_);
  }

  // One lane of every warp says for its warp that this warpgroup's half of the page is no longer read;
  // another one says it to the other CTA that writes there.
  __device__ __forceinline__ void release(Parity page) {
    __syncwarp();
    uint64_t* empty = &smem_.pages.empty[page][kHalf];
    if constexpr (Source::kCtas == 1) {
      if (lane_ == 0) ptx::mbarrier_arrive(empty);
    } else {
      if (lane_ < Source::kCtas) ptx::mbarrier_arrive_in(empty, lane_);
    }
  }

  __device__ __forceinline__ void release_query() {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(smem_.query.empty[0]);
  }

  // Behind a run's products. The last run's result stays in registers; what becomes of it is up to the
  // kernel.
  __device__ __forceinline__ void end_run(const PageRun& run, bool is_last) {
    ptx::wgmma_touch(rO_);
    complete_sums(run);
    if (is_last) {
      last_.run = run;
    } else {
      store_run<Element>(params_, place_, run, at_, state_, rO_);
    }
  }

 private:
  // Zeroes the value rows of slots beyond the sequence's end: their probability is zero, but zero times NaN
  // is not.
  __device__ __forceinline__ void clear_tail(int valid_tokens) {
    const int chunks = (kPageTokens - valid_tokens) * (kRowBytes / sizeof(uint4));
#pragma unroll 1
    for (int piece = 0; piece < kLatentPieces; ++piece) {
      uint4* rows = reinterpret_cast<uint4*>(smem_.sK[kOwn][piece][valid_tokens]);
      for (int i = thread_; i < chunks; i += kWarpgroupThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
  }

  // The row sums of the two warpgroups are of different pages but relative to the same maximum.
  __device__ __forceinline__ void complete_sums(const PageRun& run) {
    if (run.bad_length && run.num_pages() == 0) state_.sum[0] = state_.sum[1] = NAN;
    auto& sums = smem_.row_sum[run_parity_];
    if constexpr (Mask::kReportsPeak) Mask::leave_peak(smem_, run_parity_, kOwn, at_, state_);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float total = quad_reduce(state_.sum[i], [](float a, float b) { return a + b; });
      if (at_.in_quad == 0) sums[kOwn][at_.row(i)] = total;
    }
    ptx::named_barrier_sync_unaligned(kRowSumsReady, kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      // Even plus odd in both warpgroups, so that both divide by the same number.
      state_.sum[i] = sums[kEven][at_.row(i)] + sums[kOdd][at_.row(i)];
    }
    if constexpr (Mask::kReportsPeak)
      Mask::report_peak(params_, smem_, run_parity_, run, place_, at_, state_);
    // The other warpgroup may still be reading when this one ends its next run, not the one after.
    run_parity_ ^= 1;
  }

 protected:
  const DecodeParams& params_;
  SmemPlan& smem_;
  RunResult& last_;
  RowState& state_;
  float (&rO_)[kOutRegisters];

 private:
  const OutputPlace place_;
  const int thread_;
  const int lane_;
  const FragmentPosition at_;
  const float scale_log2_;

  Phases<1> query_phase_;
  Phases<1> page_phase_;  // of the own pages' buffer
  int run_parity_ = 0;

  QueryRegisters<Budget::kQuerySteps> rQ_;
  float rS_[kScoreRegisters];
  uint32_t rP_[kTokenSteps][4];
};

}  // namespace pallas_attn::mla::sm90
