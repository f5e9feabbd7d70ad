// What a kernel of this shape may do differently: where its pages come from and which tokens a row sees. A
// kernel over another cache, or over chosen tokens, brings classes of its own with these members; producer,
// walker and warpgroups take them as template arguments.
#pragma once

#include <cstdint>

#include "mla/sm90/dense/page_table.h"
#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/smem_plan.h"
#include "ptx/tma.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::mla::sm90 {

// Pages of a pool through the copy engine's tensor maps.
class TablePages : public PageTable {
 public:
  using Budget = WideConsumers;
  static constexpr bool kUnfenced = false;
  static constexpr int kCtas = 1;

  __device__ TablePages(const DecodeParams& params, const CUtensorMap& cache_map, uint64_t policy,
                        int kv_head, int lane)
      : PageTable(params, lane), cache_map_(cache_map), first_dim_(kv_head * kQueryDim), policy_(policy) {}

  // By one lane. For a page outside the pool the copy engine fills zeros; it cannot fault.
  __device__ __forceinline__ void copy_piece(int page, int piece, SmemPlan::Piece& to, uint64_t* full) const {
    ptx::mbarrier_arrive_expect_bytes(full, kPieceBytes);
    ptx::tma_load_3d(to, &cache_map_, full, policy_, first_dim_ + piece * kPieceDims, 0, page);
  }

 private:
  const CUtensorMap& cache_map_;
  const int first_dim_;
  const uint64_t policy_;
};

// Every token of the request; under `causal` query token i of q only those up to its own position.
struct PrefixMask {
  // A request's last page may hold slots that are not its own, with anything in them.
  static constexpr bool kHoldsTail = true;
  static constexpr bool kReportsPeak = false;

  static __device__ __forceinline__ void hide(float (&rS)[kScoreRegisters], const FragmentPosition& at,
                                              const DecodeParams& params, const SmemPlan&, Parity,
                                              const PageRun& run, int page, int first_row) {
    if (!hides_any(params, run, page)) return;
    int end[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) end[i] = end_of(params, run, first_row + at.row(i));
    mask_scores(rS, at, page * kPageTokens, end);
  }

  // Whether there is a token in the page that some row must not see.
  static __device__ __forceinline__ bool hides_any(const DecodeParams& params, const PageRun& run, int page) {
    const int hidden_at_most = params.causal ? params.query_len - 1 : 0;
    return run.seq_len - page * kPageTokens - hidden_at_most < kPageTokens;
  }

  // The tokens a row sees are those before this one; `row` counts within the KV head.
  static __device__ __forceinline__ int end_of(const DecodeParams& params, const PageRun& run, int row) {
    return params.causal ? run.seq_len - params.query_len + 1 + row / params.group : run.seq_len;
  }
};

}  // namespace pallas_attn::mla::sm90
