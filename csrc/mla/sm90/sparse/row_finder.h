// What the feeders have in common. Each of their warps has some of a tile's 64 tokens: it looks up where
// they lie, and tells which of them are there.
#pragma once

#include "mla/sm90/dense/query_loader.h"
#include "mla/sm90/sparse/chosen.h"
#include "ptx/async_copy.h"
#include "ptx/cache.h"

namespace pallas_attn::mla::sm90 {

template <int kTokenBytes>
class RowFinder {
 public:
  __device__ RowFinder(const SparseParams& params, SparsePlan& smem, int warp)
      : params_(params), smem_(smem), warp_(warp), lane_(threadIdx.x % 32) {}

 protected:
  static constexpr int kWarpTokens = kPageTokens / kWarpgroupWarps;

  // `feed(run)` for every run of a part that has tiles, the ids of its first one being under way.
  template <typename Ids, typename Feed>
  __device__ __forceinline__ void walk(const CUtensorMap& query_map, int part, Feed feed) {
    QueryLoader query(params_, query_map, smem_, 0, blockIdx.x, lane_);
    RunWalker<Ids> walker(params_, part);
    while (!walker.done()) {
      const int token = walker.request();
      walker.fetch();
      fetch_id(token, walker.page_begin());
      if (warp_ == 0) query.load(token);
      const PageRun run = walker.run();
      if (run.num_pages() > 0) feed(run);
    }
  }

  // The rows of the warp's tokens of a tile whose ids have been sent for: one a lane, over and over.
  __device__ __forceinline__ int find_rows(const PageRun& run, int tile) const {
    // One bad tile makes the whole run NaN.
    if (run.bad_length) return kUnusable;
    // What comes behind a run is another CTA's, or nobody's.
    const int listed = tile < run.page_end ? run.seq_len : 0;
    return find_row(params_, run.request, id_, position(tile), listed);
  }

  // Before anything is told of a tile: which tokens are there, and whether all are that should be.
  __device__ __forceinline__ void tell_held(Parity buffer, int own_row) {
    const uint32_t held = __ballot_sync(0xffffffff, own_row >= 0);
    const bool unusable = __any_sync(0xffffffff, own_row == kUnusable);
    if (lane_ != 0) return;
    reinterpret_cast<uint16_t*>(&smem_.held[buffer])[warp_] = held;
    // A flag of a byte each: any of them makes the word true.
    reinterpret_cast<uint8_t*>(&smem_.bad_page[buffer])[warp_] = unusable;
  }

  // Address 0 of the pool where there is no row.
  __device__ __forceinline__ const char* row_at(int row) const {
    return static_cast<const char*>(params_.latent_cache) + static_cast<int64_t>(max(row, 0)) * kTokenBytes;
  }

  // Into the L2, of a pool of bytes: lane l has the row of token l % kTokens. Rows may begin inside of a
  // line, but no line has less than 16 bytes of one.
  template <int kTokens>
  __device__ __forceinline__ void prefetch(int row) const {
    constexpr int kLines = (kTokenBytes + ptx::kLineBytes - 1) / ptx::kLineBytes;
    constexpr int kRowLanes = 32 / kTokens;
    const char* from = row_at(row) + lane_ / kTokens * ptx::kLineBytes;
#pragma unroll
    for (int line = 0; line < kLines; line += kRowLanes) {
      if (row >= 0 && line + lane_ / kTokens < kLines) ptx::prefetch_line(from + line * ptx::kLineBytes);
    }
  }

  // The warp's rows of the rotary piece of a pool of bytes, eight lanes a token.
  __device__ __forceinline__ void copy_rope(Parity buffer, int own_row) {
    const int token = lane_ / 8, chunk = lane_ % 8;
    const uint32_t first = ptx::shared_address(smem_.sK[buffer][kRopePiece][warp_ * kWarpTokens + token]);
    const uint32_t to = first + ((chunk ^ token) << 4);
#pragma unroll
    for (int i = 0; i < kWarpTokens; i += 4) {
      const int row = __shfl_sync(0xffffffff, own_row, i + token);
      ptx::copy_async((to ^ (i % 8 << 4)) + i * kRowBytes, row_at(row) + kRopeAt + chunk * 16, row >= 0);
    }
    ptx::arrive_behind_copies(&smem_.pages.full[buffer][kRopePiece]);
  }

  const SparseParams& params_;
  SparsePlan& smem_;
  const int warp_;
  const int lane_;
  Phases<kBuffers> phases_;

  __device__ __forceinline__ void fetch_id(int token, int tile) {
    constexpr int kAhead = 4 * kPageTokens;
    const int at = position(tile);
    const int* ids = params_.indices + static_cast<int64_t>(token) * params_.topk + at;
    id_ = at < params_.topk ? ptx::load_int(ids) : -1;
    if (at < params_.topk - kAhead) ptx::prefetch_line(ids + kAhead);
  }

 private:
  __device__ int position(int tile) const {
    return tile * kPageTokens + warp_ * kWarpTokens + lane_ % kWarpTokens;
  }

  int id_;
};

}  // namespace pallas_attn::mla::sm90
