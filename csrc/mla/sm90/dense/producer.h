// The producer warp: waits for halves of the buffers to become free and has the copy engine fill them.
#pragma once

#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

template <typename Source>
class Producer {
 public:
  __device__ Producer(const DecodeParams& params, const CUtensorMap& query_map, const CUtensorMap& cache_map,
                      SmemPlan& smem, int kv_head, int row_tile, int lane)
      : params_(params),
        query_map_(query_map),
        smem_(smem),
        kv_head_(kv_head),
        row_tile_(row_tile),
        lane_(lane),
        policy_(ptx::l2_evict_first_policy()),
        source_(params, cache_map, policy_, kv_head, lane) {}

  __device__ void work_through(int part) {
    RunWalker<Source> walker(params_, part);
    while (!walker.done()) {
      // Everything the run's first page depends on is sent for before waiting for the query's place.
      source_.open(walker.request(), walker.page_begin());
      walker.fetch();
      load_query(walker.request());
      const PageRun run = walker.run();
      for (int index = run.page_begin; index < run.page_end; ++index) {
        load_page((index - run.page_begin) % kBuffers == 0 ? kEven : kOdd, source_.page(index),
                  run.bad_length);
      }
    }
  }

 private:
  __device__ void load_query(int request) {
    ptx::mbarrier_wait(smem_.query.empty[0], query_phase_.empty());
    query_phase_.advance();
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(smem_.query.full[0], kTileBytes);
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::tma_load_3d(smem_.sQ[piece], &query_map_, smem_.query.full[0], policy_, piece * kPieceDims,
                         row_tile_ * kTileRows, request * params_.num_kv_heads + kv_head_);
      }
    }
    __syncwarp();
  }

  // The page's owner reads the pieces in this order: its own half first, because that is freed first. A page
  // that does not exist is loaded like any other and flagged; the flag is written before the pieces' barriers
  // can complete and read before the owner hands its half back.
  __device__ void load_page(Parity buffer, int page, bool bad_length) {
    const uint32_t free_parity = page_phases_.empty(buffer);
    const Half owners = half_of(buffer), others = half_of(other(buffer));
    ptx::mbarrier_wait(&smem_.pages.empty[buffer][owners], free_parity);
    if (lane_ == 0) {
      smem_.bad_page[buffer] = bad_length || !source_.exists(page);
      load_half(buffer, owners, page);
    }
    ptx::mbarrier_wait(&smem_.pages.empty[buffer][others], free_parity);
    if (lane_ == 0) {
      load_half(buffer, others, page);
      load_piece(buffer, kRopePiece, page);
    }
    page_phases_.advance(buffer);
    __syncwarp();
  }

  __device__ void load_half(Parity buffer, Half half, int page) {
    const int first = first_piece(half);
    for (int piece = first; piece < first + kHalfPieces; ++piece) load_piece(buffer, piece, page);
  }

  __device__ void load_piece(Parity buffer, int piece, int page) {
    source_.copy_piece(page, piece, smem_.sK[buffer][piece], &smem_.pages.full[buffer][piece]);
  }

  const DecodeParams& params_;
  const CUtensorMap& query_map_;
  SmemPlan& smem_;
  const int kv_head_;
  const int row_tile_;
  const int lane_;
  const uint64_t policy_;
  Source source_;
  Phases<1> query_phase_;
  Phases<kBuffers> page_phases_;
};

}  // namespace pallas_attn::mla::sm90
