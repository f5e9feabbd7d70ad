// A warp's share of a tile of chosen tokens: their ids, sent for ahead, and the rows of the pool these lead
// to.
#pragma once

#include "mla/sm90/sparse/chosen.h"
#include "ptx/cache.h"

namespace pallas_attn::mla::sm90 {

template <int kTokenBytes>
class ListedRows {
 public:
  __device__ ListedRows(const SparseParams& params, int warp)
      : params_(params), warp_(warp), lane_(threadIdx.x % 32) {}

 protected:
  static constexpr int kWarpTokens = kPageTokens / kWarpgroupWarps;

  // `feed(run)` for every run of a part that has tiles, the ids of its first one being under way;
  // `begin(token)` before, of any run.
  template <typename Begin, typename Feed>
  __device__ __forceinline__ void walk(int part, Begin begin, Feed feed) {
    RunWalker<TokenLists> walker(params_, part);
    while (!walker.done()) {
      const int token = walker.request();
      walker.fetch();
      fetch_id(token, walker.page_begin());
      begin(token);
      const PageRun run = walker.run();
      if (run.num_pages() > 0) feed(run);
    }
  }

  __device__ __forceinline__ void fetch_id(int token, int tile) {
    constexpr int kAhead = 4 * kPageTokens;
    const int at = position(tile);
    const int* ids = params_.indices + static_cast<int64_t>(token) * params_.topk + at;
    id_ = at < params_.topk ? ptx::load_int(ids) : -1;
    if (at < params_.topk - kAhead) ptx::prefetch_line(ids + kAhead);
  }

  // The rows of the warp's tokens of a tile whose ids have been sent for: one a lane, over and over.
  __device__ __forceinline__ int find_rows(const PageRun& run, int tile) const {
    // One bad tile makes the whole run NaN.
    if (run.bad_length) return kUnusable;
    // What comes behind a run is another CTA's, or nobody's.
    const int listed = tile < run.page_end ? run.seq_len : 0;
    return find_row(params_, run.request, id_, position(tile), listed);
  }

  // Before anything is told of a tile, which will lie in `buffer`: which tokens are there, and whether all
  // are that should be.
  template <typename Plan>
  __device__ __forceinline__ void tell_held(Plan& smem, int buffer, int own_row) {
    const uint32_t held = __ballot_sync(0xffffffff, own_row >= 0);
    const bool unusable = __any_sync(0xffffffff, own_row == kUnusable);
    if (lane_ != 0) return;
    reinterpret_cast<uint16_t*>(&smem.held[buffer])[warp_] = held;
    // A flag of a byte each: any of them makes the word true.
    reinterpret_cast<uint8_t*>(&smem.bad_page[buffer])[warp_] = unusable;
  }

  // Address 0 of the pool where there is no row.
  __device__ __forceinline__ const char* row_at(int row) const {
    return static_cast<const char*>(params_.latent_cache) + static_cast<int64_t>(max(row, 0)) * kTokenBytes;
  }

  const SparseParams& params_;
  const int warp_;
  const int lane_;

 private:
  __device__ int position(int tile) const {
    return tile * kPageTokens + warp_ * kWarpTokens + lane_ % kWarpTokens;
  }

  int id_;
};

}  // namespace pallas_attn::mla::sm90
