// The producer warp: waits for halves of the buffers to become free and has the copy engine fill them.
#pragma once

#include "mla/sm90/dense/query_loader.h"
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
        smem_(smem),
        lane_(lane),
        policy_(ptx::l2_evict_first_policy()),
        query_(params, query_map, smem, kv_head, row_tile, lane),
        source_(params, cache_map, policy_, kv_head, lane) {}

  __device__ void work_through(int part) {
    RunWalker<Source> walker(params_, part);
    while (!walker.done()) {
      // Everything the run's first page depends on is sent for before waiting for the query's place.
      source_.open(walker.request(), walker.page_begin());
      walker.fetch();
      query_.load(walker.request());
      const PageRun run = walker.run();
      for (int index = run.page_begin; index < run.page_end; ++index) {
        load_page((index - run.page_begin) % kBuffers == 0 ? kEven : kOdd, source_.page(index),
                  run.bad_length);
      }
    }
  }

 private:
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
  SmemPlan& smem_;
  const int lane_;
  const uint64_t policy_;
  QueryLoader query_;
  Source source_;
  Phases<kBuffers> page_phases_;
};

}  // namespace pallas_attn::mla::sm90
