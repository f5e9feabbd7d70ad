// The producer warp: waits for parts of the buffers to become free and has the copy engine fill them.
#pragma once

#include "mla/sm90/dense/smem_plan.h"
#include "mla/sm90/dense/tile_walker.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

// A run of one request's row of the block table, 32 entries at a time in the lanes of a warp, the next 32
// already on their way. Entries past the run's end are fetched (within the row) but never asked for.
class PageList {
 public:
  __device__ PageList(const DecodeParams& params, int request, int begin, int lane)
      : row_(params.block_tables + static_cast<int64_t>(request) * params.max_blocks + lane),
        entries_(params.max_blocks - lane),
        base_(begin) {
    current_ = fetch(begin);
    next_ = fetch(begin + 32);
  }

  // Call with `index` rising by one, from all lanes.
  __device__ int page(int index) {
    if (index == base_ + 32) {
      base_ = index;
      current_ = next_;
      next_ = fetch(base_ + 32);
    }
    return __shfl_sync(0xffffffff, current_, index - base_);
  }

 private:
  __device__ int fetch(int base) const { return base < entries_ ? __ldg(row_ + base) : 0; }

  const int* row_;
  int entries_, base_;
  int current_, next_;
};

class Producer {
 public:
  __device__ Producer(const DecodeParams& params, const CUtensorMap& query_map, const CUtensorMap& cache_map,
                      SmemPlan& smem, int kv_head, int row_tile, int lane)
      : params_(params),
        query_map_(query_map),
        cache_map_(cache_map),
        smem_(smem),
        kv_head_(kv_head),
        row_tile_(row_tile),
        lane_(lane),
        policy_(ptx::l2_evict_first_policy()) {}

  __device__ void run(int part) {
    TileWalker walker(params_, part);
    while (!walker.done()) {
      // Everything the tile's first page depends on is sent for before waiting for the query's place.
      PageList pages(params_, walker.request(), walker.page_begin(), lane_);
      walker.fetch();
      load_query(walker.request());
      const SplitTile tile = walker.tile();
      for (int index = tile.page_begin; index < tile.page_end; ++index) {
        load_page((index - tile.page_begin) % kBuffers, pages.page(index), tile.bad_length);
      }
    }
  }

 private:
  __device__ void load_query(int request) {
    ptx::mbarrier_wait(&smem_.query_empty, query_phase_ ^ 1);
    query_phase_ ^= 1;
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(&smem_.query_full, kBlockBytes);
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::tma_load_3d(smem_.sQ[piece], &query_map_, &smem_.query_full, policy_, piece * kPieceDims,
                         row_tile_ * kTileRows, request * params_.num_kv_heads + kv_head_);
      }
    }
    __syncwarp();
  }

  // A page outside the pool is loaded like any other (the copy engine fills zeros, it cannot fault) and
  // flagged; the flag is written before the pieces' barriers can complete and read before the owner hands its
  // half back.
  __device__ void load_page(int buffer, int page, bool bad_length) {
    const uint32_t free_parity = (kv_phase_ >> buffer & 1) ^ 1;
    // The page's owner reads the pieces in this order: its own half first, because that is freed first.
    const BufferPart own = buffer == 0 ? kLeftPart : kRightPart;
    const BufferPart other = buffer == 0 ? kRightPart : kLeftPart;
    ptx::mbarrier_wait(&smem_.kv_empty[buffer][own], free_parity);
    if (lane_ == 0) {
      smem_.bad_page[buffer] = bad_length || page < 0 || page >= params_.num_pages;
      load_half(buffer, own, page);
    }
    ptx::mbarrier_wait(&smem_.kv_empty[buffer][other], free_parity);
    if (lane_ == 0) {
      load_half(buffer, other, page);
      load_piece(buffer, kRopePiece, page);
    }
    kv_phase_ ^= 1u << buffer;
    __syncwarp();
  }

  __device__ void load_half(int buffer, BufferPart part, int page) {
    const int first = part == kLeftPart ? 0 : kHalfPieces;
    for (int piece = first; piece < first + kHalfPieces; ++piece) load_piece(buffer, piece, page);
  }

  __device__ void load_piece(int buffer, int piece, int page) {
    uint64_t* full = &smem_.kv_full[buffer][piece];
    ptx::mbarrier_arrive_expect_bytes(full, kPieceBytes);
    ptx::tma_load_3d(smem_.sK[buffer][piece], &cache_map_, full, policy_,
                     kv_head_ * kQueryDim + piece * kPieceDims, 0, page);
  }

  const DecodeParams& params_;
  const CUtensorMap& query_map_;
  const CUtensorMap& cache_map_;
  SmemPlan& smem_;
  const int kv_head_;
  const int row_tile_;
  const int lane_;
  const uint64_t policy_;
  uint32_t query_phase_ = 0;
  uint32_t kv_phase_ = 0;  // bit i: phase of buffer i
};

}  // namespace pallas_attn::mla::sm90
