// What a kernel of this shape may do differently: where its pages come from and which tokens a row sees. A
// kernel over another cache, or over chosen tokens, brings classes of its own with these members; producer,
// walker and warpgroups take them as template arguments.
#pragma once

#include <cstdint>

#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/smem_plan.h"
#include "ptx/tma.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::mla::sm90 {

// Pages of a pool, by a request's row of the block table. The row is read 32 entries at a time in the lanes
// of a warp, the next 32 already on their way; entries past the run's end are fetched (within the row) but
// never asked for. All members are for one whole warp but copy_piece().
class TablePages {
 public:
  using Budget = WideConsumers;
  static constexpr bool kUnfenced = false;
  static constexpr int kCtas = 1;

  // Tokens of a request as given, and the most its pages can hold.
  static __device__ __forceinline__ int length(const DecodeParams& params, int request) {
    return __ldg(params.seq_lens + request);
  }
  static __device__ __forceinline__ int64_t capacity(const DecodeParams& params) {
    return static_cast<int64_t>(params.max_blocks) * kPageTokens;
  }

  __device__ TablePages(const DecodeParams& params, const CUtensorMap& cache_map, uint64_t policy,
                        int kv_head, int lane)
      : params_(params),
        cache_map_(cache_map),
        first_dim_(kv_head * kQueryDim),
        lane_(lane),
        policy_(policy) {}

  // A run of a request that begins with page `begin`.
  __device__ __forceinline__ void open(int request, int begin) {
    row_ = params_.block_tables + static_cast<int64_t>(request) * params_.max_blocks + lane_;
    base_ = begin;
    current_ = fetch(begin);
    next_ = fetch(begin + 32);
  }

  // Page `index` of the request's; call with `index` rising by one.
  __device__ __forceinline__ int page(int index) {
    if (index == base_ + 32) {
      base_ = index;
      current_ = next_;
      next_ = fetch(base_ + 32);
    }
    return __shfl_sync(0xffffffff, current_, index - base_);
  }

  __device__ __forceinline__ bool exists(int page) const { return page >= 0 && page < params_.num_pages; }

  // By one lane. For a page outside the pool the copy engine fills zeros; it cannot fault.
  __device__ __forceinline__ void copy_piece(int page, int piece, SmemPlan::Piece& to, uint64_t* full) const {
    ptx::mbarrier_arrive_expect_bytes(full, kPieceBytes);
    ptx::tma_load_3d(to, &cache_map_, full, policy_, first_dim_ + piece * kPieceDims, 0, page);
  }

 private:
  __device__ int fetch(int base) const { return base < params_.max_blocks - lane_ ? __ldg(row_ + base) : 0; }

  const DecodeParams& params_;
  const CUtensorMap& cache_map_;
  const int first_dim_;
  const int lane_;
  const uint64_t policy_;
  const int* row_;
  int base_, current_, next_;
};

// Every token of the request; under `causal` query token i of q only those up to its own position.
struct PrefixMask {
  // A request's last page may hold slots that are not its own, with anything in them.
  static constexpr bool kHoldsTail = true;
  static constexpr bool kReportsPeak = false;

  static __device__ __forceinline__ void hide(float (&rS)[kScoreRegisters], const FragmentPosition& at,
                                              const DecodeParams& params, const SmemPlan&, Parity,
                                              const PageRun& run, int page, int first_row) {
    const int first_token = page * kPageTokens;
    // Whether there is a token in the page that some row must not see.
    if (run.seq_len - first_token - (params.causal ? params.query_len - 1 : 0) >= kPageTokens) return;
    int end[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) end[i] = end_of(params, run, first_row + at.row(i));
    mask_scores(rS, at, first_token, end);
  }

 private:
  // The tokens a row sees are those before this one; `row` counts within the KV head.
  static __device__ __forceinline__ int end_of(const DecodeParams& params, const PageRun& run, int row) {
    return params.causal ? run.seq_len - params.query_len + 1 + row / params.group : run.seq_len;
  }
};

}  // namespace pallas_attn::mla::sm90
