// The third warpgroup over a pool of the query's elements: rows are gathered by copies of 16 bytes a thread.
//
// Each of its four warps has one half of one of the two buffers to itself. What it copies counts as an
// ordinary store of its threads, so they wait for it before they can hand it to wgmma; while one waits, the
// three others have copies of their own under way.
#pragma once

#include "mla/sm90/dense/query_loader.h"
#include "mla/sm90/sparse/chosen.h"
#include "ptx/async_copy.h"
#include "ptx/cache.h"

namespace pallas_attn::mla::sm90 {

class RowCopier {
 public:
  struct Budget {
    static constexpr int kRegisters = 224, kFeederRegisters = 56;
    static constexpr int kQuerySteps = 0;
    static constexpr bool kOwnProbabilities = true, kMerges = true;
  };
  using Ids = ChosenIds<Budget>;
  // Warps that fill a piece.
  static constexpr int kWriters = 1;

  __device__ RowCopier(const SparseParams& params, const CUtensorMap& query_map, SparsePlan& smem, int warp)
      : params_(params),
        smem_(smem),
        warp_(warp),
        lane_(threadIdx.x % 32),
        buffer_(warp / kHalves == 0 ? kEven : kOdd),
        half_(warp % kHalves == 0 ? kLow : kHigh),
        query_(params, query_map, smem, 0, blockIdx.x, lane_),
        pool_(static_cast<const char*>(params.latent_cache) + lane_ % kRowLanes * 16) {}

  __device__ void work_through(int part) {
    RunWalker<Ids> walker(params_, part);
    while (!walker.done()) {
      const int token = walker.request();
      walker.fetch();
      fetch_ids(token, walker.page_begin() + buffer_);
      if (warp_ == 0) query_.load(token);
      const PageRun run = walker.run();
      for (int tile = run.page_begin + buffer_; tile < run.page_end; tile += kBuffers) {
        find_rows(run, tile);
        // Those of the next one travel while this one's place is waited for.
        fetch_ids(token, tile + kBuffers);
        ptx::mbarrier_wait(&smem_.pages.empty[buffer_][half_], phase_.empty());
        phase_.advance();
        copy_rows(run.bad_length);
        announce_pieces();
      }
    }
  }

 private:
  static constexpr int kRowBytes = kQueryDim * 2;
  static constexpr int kIdsPerLane = kPageTokens / 32;
  static constexpr int kRowLanes = kPieceDims * 2 / 16;  // that copy a piece's row together
  static constexpr int kRowsAtOnce = 32 / kRowLanes;

  __device__ __forceinline__ void fetch_ids(int token, int tile) {
#pragma unroll
    for (int j = 0; j < kIdsPerLane; ++j) {
      ids_[j] = read_id(params_, token, tile * kPageTokens + j * 32 + lane_);
    }
  }

  __device__ __forceinline__ void find_rows(const PageRun& run, int tile) {
    bool unusable = false;
#pragma unroll
    for (int j = 0; j < kIdsPerLane; ++j) {
      const int position = tile * kPageTokens + j * 32 + lane_;
      const FoundRow found = find_row(params_, run.request, ids_[j], position, run.seq_len);
      rows_[j] = found.row;
      unusable |= found.unusable;
    }
    unusable_ = __any_sync(0xffffffff, unusable);
  }

  // The rotary piece belongs to the half that is freed with it.
  __device__ bool has_rope() const { return half_ != half_of(buffer_); }

  // Every piece is a group of copies; who has no rotary piece closes an empty one.
  __device__ __forceinline__ void copy_rows(bool bad_length) {
    // Written before the pieces' barriers can complete and read before the owner hands its half back.
    if (!has_rope()) tell_held(bad_length);
#pragma unroll 1
    for (int i = 0; i < kHalfPieces; ++i) copy_piece(first_piece(half_) + i);
    if (has_rope()) copy_piece(kRopePiece);
    ptx::close_copies();
  }

  __device__ __forceinline__ void tell_held(bool bad_length) {
    const uint64_t low = __ballot_sync(0xffffffff, rows_[0] >= 0);
    const uint64_t high = __ballot_sync(0xffffffff, rows_[1] >= 0);
    if (lane_ != 0) return;
    smem_.held[buffer_] = low | high << 32;
    smem_.bad_page[buffer_] = bad_length || unusable_;
  }

  __device__ __forceinline__ void copy_piece(int piece) {
    const int row_lane = lane_ / kRowLanes, chunk = lane_ % kRowLanes;
    const uint32_t to = ptx::shared_address(smem_.sK[buffer_][piece]);
    const char* from = pool_ + piece * (kPieceDims * 2);
#pragma unroll
    for (int i = 0; i < kPageTokens / kRowsAtOnce; ++i) {
      const int token = i * kRowsAtOnce + row_lane;
      const int row = __shfl_sync(0xffffffff, rows_[i * kRowsAtOnce / 32], token % 32);
      const uint32_t place = token * (kPieceDims * 2) + ((chunk ^ (token % 8)) << 4);
      ptx::copy_async(to + place, from + static_cast<int64_t>(max(row, 0)) * kRowBytes, row >= 0);
    }
    ptx::close_copies();
  }

  __device__ __forceinline__ void announce_pieces() {
    announce<0>();
    announce<1>();
    announce<2>();
    announce<3>();
    if (has_rope()) announce<kHalfPieces>();
  }

  template <int kGroup>
  __device__ __forceinline__ void announce() {
    ptx::wait_copies<kHalfPieces - kGroup>();
    ptx::fence_async_shared();
    __syncwarp();
    const int piece = kGroup == kHalfPieces ? kRopePiece : first_piece(half_) + kGroup;
    if (lane_ == 0) ptx::mbarrier_arrive(&smem_.pages.full[buffer_][piece]);
  }

  const SparseParams& params_;
  SparsePlan& smem_;
  const int warp_;
  const int lane_;
  const Parity buffer_;
  const Half half_;
  QueryLoader query_;
  const char* pool_;
  Phases<1> phase_;
  int ids_[kIdsPerLane];
  int rows_[kIdsPerLane];
  bool unusable_;
};

}  // namespace pallas_attn::mla::sm90
