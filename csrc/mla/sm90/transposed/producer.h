// The producer warp: has the copy engine bring pages as they are.
#pragma once

#include "mla/sm90/dense/page_table.h"
#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/transposed/query.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90::transposed {

// Tokens of a KV head in the pool, as pages of a request.
class WholePages {
 public:
  __device__ WholePages(const DecodeParams& params, int kv_head, int lane)
      : table_(params, lane),
        pool_(static_cast<const char*>(params.latent_cache) + kv_head * kTokenBytes),
        stride_(params.num_kv_heads * kTokenBytes),
        lane_(lane),
        policy_(ptx::l2_evict_first_policy()) {}

  __device__ __forceinline__ void open(int request, int begin) { table_.open(request, begin); }

  // Page `index` of the request's, or -1 if it is not in the pool. By a whole warp, with `index` rising by
  // one.
  __device__ __forceinline__ int find(int index) {
    const int page = table_.page(index);
    return table_.exists(page) ? page : -1;
  }

  // The first tokens of a page that was found; by a whole warp. `full` expects their bytes.
  __device__ __forceinline__ void copy(int page, int tokens, char* to, uint64_t* full) const {
    const char* from = pool_ + static_cast<int64_t>(page) * kPageTokens * stride_;
    if (stride_ == kTokenBytes) {
      if (lane_ == 0) ptx::bulk_load(to, from, tokens * kTokenBytes, full, policy_);
    } else {
#pragma unroll 1
      for (int token = lane_; token < tokens; token += 32) {
        ptx::bulk_load(to + token * kTokenBytes, from + static_cast<int64_t>(token) * stride_, kTokenBytes,
                       full, policy_);
      }
    }
  }

 private:
  PageTable table_;
  const char* const pool_;
  const int stride_;
  const int lane_;
  const uint64_t policy_;
};

template <typename Source, typename Plan>
class Producer {
 public:
  static constexpr int kWarps = 1, kWriters = 1;

  __device__ Producer(const DecodeParams& params, Plan& smem, int)
      : params_(params),
        smem_(smem),
        place_(place_of_block(0)),
        lane_(threadIdx.x % 32),
        source_(params, place_.kv_head, lane_) {}

  __device__ void work_through(int part) {
    RunWalker<PageTable> walker(params_, part);
    int stage = 0, filled = 0;
    while (!walker.done()) {
      source_.open(walker.request(), walker.page_begin());
      walker.fetch();
      const PageRun run = walker.run();
      prefetch_query<Plan::kRows>(params_, place_, run.request, lane_);
      for (int page = run.page_begin; page < run.page_end; ++page) {
        ptx::mbarrier_wait(smem_.page_ring.empty[stage], phases_.empty(stage));
        pace(filled++);
        load_page(run, page, stage);
        phases_.advance(stage);
        stage = Plan::next_stage(stage);
      }
    }
  }

 private:
  // Before the page that is number `filled` of this CTA. All CTAs begin together: if each asked for as many
  // pages as it holds, everybody's first would come among everybody's others. So until the ring has gone
  // round once, a page is asked for when the second one before it has landed.
  __device__ __forceinline__ void pace(int filled) {
    constexpr int kOnTheirWay = 2;
    if (filled < kOnTheirWay || filled >= Plan::kStages) return;
    ptx::mbarrier_wait(smem_.page_ring.full[filled - kOnTheirWay], 0);
  }

  // The flag is written before anybody can be told that the page is there. What is not copied is cleared or
  // made NaN by who reads.
  __device__ __forceinline__ void load_page(const PageRun& run, int index, int stage) {
    const int page = source_.find(index);
    const bool bad = run.bad_length || page < 0;
    const int tokens = bad ? 0 : min(kPageTokens, run.seq_len - index * kPageTokens);
    uint64_t* full = smem_.page_ring.full[stage];
    if (lane_ == 0) {
      smem_.bad_page[stage] = bad;
      ptx::mbarrier_arrive_expect_bytes(full, tokens * kTokenBytes);
    }
    __syncwarp();
    if (!bad) source_.copy(page, tokens, smem_.pages[stage], full);
  }

  const DecodeParams& params_;
  Plan& smem_;
  const OutputPlace place_;
  const int lane_;
  Source source_;
  Phases<Plan::kStages> phases_;
};

}  // namespace pallas_attn::mla::sm90::transposed
