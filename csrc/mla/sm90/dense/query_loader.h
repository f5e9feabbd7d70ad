// The query's tile: one warp has the copy engine fill it, run after run.
#pragma once

#include "mla/sm90/dense/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

// Of a call's queries: so many stay in the L2, where whoever made them left them. More would take the room of
// outputs, partial results and pages that a second tile of rows reads.
constexpr int64_t kMostKeptBytes = 10 << 20;

class QueryLoader {
 public:
  __device__ QueryLoader(const DecodeParams& params, const CUtensorMap& map, SmemPlan& smem, int kv_head,
                         int row_tile, int lane)
      : params_(params), map_(map), smem_(smem), kv_head_(kv_head), row_tile_(row_tile), lane_(lane) {}

  __device__ void load(int request) {
    ptx::mbarrier_wait(smem_.query.empty[0], phase_.empty());
    phase_.advance();
    if (lane_ == 0) {
      // Asked for every time: it would take two registers in between.
      const uint64_t policy = params_.query_bytes() <= kMostKeptBytes ? ptx::l2_evict_unchanged_policy()
                                                                      : ptx::l2_evict_first_policy();
      ptx::mbarrier_arrive_expect_bytes(smem_.query.full[0], kTileBytes);
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::tma_load_3d(smem_.sQ[piece], &map_, smem_.query.full[0], policy, piece * kPieceDims,
                         row_tile_ * kTileRows, request * params_.num_kv_heads + kv_head_);
      }
    }
    __syncwarp();
  }

 private:
  const DecodeParams& params_;
  const CUtensorMap& map_;
  SmemPlan& smem_;
  const int kv_head_;
  const int row_tile_;
  const int lane_;
  Phases<1> phase_;
};

}  // namespace pallas_attn::mla::sm90
