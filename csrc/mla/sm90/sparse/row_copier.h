// The third warpgroup over a pool of the query's elements: rows are gathered by copies of 16 bytes a thread.
//
// Nobody waits for a copy but who multiplies with it: the copies themselves arrive at the barrier of what
// they complete, as those of FlashMLA's prefill do, and the fence between them and wgmma is the reader's. So
// a half of a buffer is asked for as soon as it is free, whatever else is still under way.
#pragma once

#include "mla/sm90/sparse/row_finder.h"

namespace pallas_attn::mla::sm90 {

class RowCopier : RowFinder<kQueryDim * 2> {
  struct Registers {
    static constexpr int kRegisters = 224, kFeederRegisters = 56;
    static constexpr int kQuerySteps = 0;
    static constexpr bool kOwnProbabilities = true, kMerges = true;
  };

 public:
  using Ids = ChosenIds<Registers>;
  // Every lane by its copies, and one for what the warp has told.
  static constexpr int kWriters = kWarpgroupThreads + kWarpgroupWarps, kRopeWriters = kWriters;

  __device__ RowCopier(const SparseParams& params, const CUtensorMap& query_map, SparsePlan& smem, int warp)
      : RowFinder(params, smem, warp), query_map_(query_map) {}

  __device__ void work_through(int part) {
    walk(query_map_, part, [&](const PageRun& run) { copy_run(run); });
  }

 private:
  static constexpr int kRowLanes = kRowBytes / 16;  // that copy a piece's row together
  static constexpr int kRowsAtOnce = 32 / kRowLanes;

  __device__ __forceinline__ void copy_run(const PageRun& run) {
    int next = find_rows(run, run.page_begin);
    fetch_id(run.request, run.page_begin + 1);
    Parity buffer = kEven;
#pragma unroll 1
    for (int tile = run.page_begin; tile < run.page_end; ++tile, buffer = other(buffer)) {
      const int now = next;
      next = find_rows(run, tile + 1);
      fetch_id(run.request, tile + 2);

      const Half owners = half_of(buffer), others = half_of(other(buffer));
      const uint32_t free_parity = phases_.empty(buffer);
      ptx::mbarrier_wait(&smem_.pages.empty[buffer][owners], free_parity);
      tell_held(buffer, now);
      copy_pieces<kHalfPieces>(now, buffer, first_piece(owners));
      ptx::mbarrier_wait(&smem_.pages.empty[buffer][others], free_parity);
      copy_pieces<kHalfPieces>(now, buffer, first_piece(others));
      copy_pieces<1>(now, buffer, kRopePiece);
      phases_.advance(buffer);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void copy_pieces(int own_row, Parity buffer, int first) {
    const int token = lane_ / kRowLanes, chunk = lane_ % kRowLanes;
    const uint32_t to =
        ptx::shared_address(smem_.sK[buffer][first][warp_ * kWarpTokens + token]) + ((chunk ^ token) << 4);
#pragma unroll
    for (int i = 0; i < kWarpTokens; i += kRowsAtOnce) {
      const int row = __shfl_sync(0xffffffff, own_row, i + token);
      const char* from = row_at(row) + first * kRowBytes + chunk * 16;
      // A token's number modulo 8 swizzles its chunks.
      const uint32_t row_to = (to ^ (i % 8 << 4)) + i * kRowBytes;
#pragma unroll
      for (int piece = 0; piece < kCount; ++piece) {
        ptx::copy_async(row_to + piece * kPieceBytes, from + piece * kRowBytes, row >= 0);
      }
    }
#pragma unroll
    for (int piece = 0; piece < kCount; ++piece) {
      ptx::arrive_behind_copies(&smem_.pages.full[buffer][first + piece]);
    }
    if (lane_ < kCount) ptx::mbarrier_arrive(&smem_.pages.full[buffer][first + lane_]);
  }

  const CUtensorMap& query_map_;
};

}  // namespace pallas_attn::mla::sm90
