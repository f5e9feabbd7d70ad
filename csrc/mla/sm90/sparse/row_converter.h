// The third warpgroup over a pool of 656 bytes a token: rows are gathered into registers, their 512 e4m3
// become bf16 there, and go to shared memory as wgmma reads them.
//
// Each of its four warps has 16 of a tile's tokens to itself, and half of their columns at a time: first
// those that the tile's owner multiplies with, because they are handed back first. While one half is
// converted, the registers that it leaves are filled with the next one.
#pragma once

#include "mla/sm90/dense/query_loader.h"
#include "mla/sm90/sparse/chosen.h"
#include "ptx/async_copy.h"
#include "ptx/cache.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90 {

class RowConverter {
 public:
  using Ids = ChosenIds<NarrowConsumers>;
  // Warps that fill a piece.
  static constexpr int kWriters = kWarpgroupWarps;

  __device__ RowConverter(const SparseParams& params, const CUtensorMap& query_map, SparsePlan& smem,
                          int warp)
      : params_(params),
        smem_(smem),
        warp_(warp),
        lane_(threadIdx.x % 32),
        query_(params, query_map, smem, 0, blockIdx.x, lane_) {}

  __device__ void work_through(int part) {
    RunWalker<Ids> walker(params_, part);
    while (!walker.done()) {
      const int token = walker.request();
      walker.fetch();
      fetch_id(token, walker.page_begin());
      if (warp_ == 0) query_.load(token);
      const PageRun run = walker.run();
      if (run.num_pages() > 0) convert_run(run);
    }
  }

 private:
  static constexpr int kWarpTokens = kPageTokens / kWarpgroupWarps;
  static constexpr int kPairs = kWarpTokens / 2;
  static constexpr int kScalesAt = kLatentDim, kRopeAt = kScalesAt + 16;
  static constexpr int kRopeBytes = kRopeDim * 2;
  static constexpr int kTokenBytes = kRopeAt + kRopeBytes;

  __device__ __forceinline__ void convert_run(const PageRun& run) {
    Found now = find_rows(run, run.page_begin);
    // One bad tile makes the whole run NaN.
    if (run.bad_length) now.held |= kUnusable;
    fetch_id(run.request, run.page_begin + 1);
    load_half(now.row, half_of(kEven));
    Parity buffer = kEven;
#pragma unroll 1
    for (int tile = run.page_begin; tile < run.page_end; ++tile, buffer = other(buffer)) {
      const Half owners = half_of(buffer), others = half_of(other(buffer));
      const uint32_t free_parity = phases_.empty(buffer);

      ptx::mbarrier_wait(&smem_.pages.empty[buffer][owners], free_parity);
      tell_held(buffer, now.held);
      prefetch_rope(now.row);
      store_half(buffer, owners, now.row, others);
      announce(buffer, owners, false);

      const int row = now.row;
      now = find_rows(run, tile + 1);
      fetch_id(run.request, tile + 2);
      ptx::mbarrier_wait(&smem_.pages.empty[buffer][others], free_parity);
      copy_rope(buffer, row);
      // The next tile's owner is the other warpgroup.
      store_half(buffer, others, now.row, others);
      ptx::wait_copies<0>();
      announce(buffer, others, true);
      phases_.advance(buffer);
    }
  }

  // Where this lane's token lies, of the warp's 16; in both halves of the warp.
  struct Found {
    int row;
    uint32_t held;  // a bit a token, in the low half
  };
  // The high half: any bit of it says that a token should be there and is not.
  static constexpr uint32_t kUnusable = 1u << kWarpTokens;

  __device__ int position(int tile) const {
    return tile * kPageTokens + warp_ * kWarpTokens + lane_ % kWarpTokens;
  }

  __device__ __forceinline__ void fetch_id(int token, int tile) {
    id_ = read_id(params_, token, position(tile));
  }

  __device__ __forceinline__ Found find_rows(const PageRun& run, int tile) const {
    // What comes behind a run is another CTA's, or nobody's.
    const int listed = tile < run.page_end ? run.seq_len : 0;
    const FoundRow found = find_row(params_, run.request, id_, position(tile), listed);
    const bool here = lane_ < kWarpTokens;
    return {found.row, __ballot_sync(0xffffffff, here ? found.row >= 0 : found.unusable)};
  }

  __device__ __forceinline__ void tell_held(Parity buffer, uint32_t held) {
    if (lane_ != 0) return;
    reinterpret_cast<uint16_t*>(&smem_.held[buffer])[warp_] = held;
    // A flag of a byte each: any of them makes the word true.
    reinterpret_cast<uint8_t*>(&smem_.bad_page[buffer])[warp_] = held >= kUnusable;
  }

  // Of a pair of tokens and half of their columns a lane has 16: four lanes a piece's row, and eight lanes
  // that store together have the two tokens, whose swizzles differ.
  __device__ int token_of_pair() const { return lane_ / 4 % 2; }
  __device__ int block() const { return lane_ % 4 + lane_ / 8 * 4; }

  __device__ const char* row_at(int row) const {
    return static_cast<const char*>(params_.latent_cache) + static_cast<int64_t>(max(row, 0)) * kTokenBytes;
  }

  __device__ __forceinline__ void load_pair(int pair, int own_row, Half half) {
    const int row = __shfl_sync(0xffffffff, own_row, pair * 2 + token_of_pair());
    const char* values = row_at(row) + half * kHalfDims + block() * 16;
    const int to_scale = kScalesAt + (half * 2 + lane_ / 16) * 4 - half * kHalfDims - block() * 16;
    raw_[pair] = row >= 0 ? ptx::load_16_bytes(values) : make_uint4(0, 0, 0, 0);
    scale_[pair] = row >= 0 ? ptx::load_float(values + to_scale) : 0.0f;
  }

  __device__ __forceinline__ void load_half(int own_row, Half half) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_pair(pair, own_row, half);
  }

  // What was loaded becomes this half of the tile in `buffer`; its registers are filled again.
  __device__ __forceinline__ void store_half(Parity buffer, Half half, int next_row, Half next_half) {
    const int piece = first_piece(half) + lane_ / 8;
    const uint32_t rows = ptx::shared_address(smem_.sK[buffer][piece][warp_ * kWarpTokens + token_of_pair()]);
    const uint32_t chunk = lane_ % 4 * 2 ^ token_of_pair();
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t at = rows + pair * (2 * kRowBytes) + ((chunk ^ (pair * 2 % 8)) << 4);
      const uint4 raw = raw_[pair];
      ptx::store_16_bytes(at, dequantize_eight(raw.x, raw.y, scale_[pair]));
      ptx::store_16_bytes(at ^ 16, dequantize_eight(raw.z, raw.w, scale_[pair]));
      load_pair(pair, next_row, next_half);
    }
  }

  // Into the L2: 128 bytes that lie in two lines.
  __device__ __forceinline__ void prefetch_rope(int own_row) const {
    if (own_row >= 0) ptx::prefetch_line(row_at(own_row) + kRopeAt + lane_ / kWarpTokens * (kRopeBytes - 1));
  }

  // Eight lanes a token.
  __device__ __forceinline__ void copy_rope(Parity buffer, int own_row) {
#pragma unroll
    for (int i = 0; i < kWarpTokens / 4; ++i) {
      const int row = __shfl_sync(0xffffffff, own_row, i * 4 + lane_ / 8);
      const int token = warp_ * kWarpTokens + i * 4 + lane_ / 8;
      const uint32_t to = ptx::shared_address(smem_.sK[buffer][kRopePiece][token]);
      ptx::copy_async(to + ((lane_ % 8 ^ token % 8) << 4), row_at(row) + kRopeAt + lane_ % 8 * 16, row >= 0);
    }
    ptx::close_copies();
  }

  __device__ __forceinline__ void announce(Parity buffer, Half half, bool with_rope) {
    ptx::fence_async_shared();
    __syncwarp();
    const int piece = lane_ < kHalfPieces ? first_piece(half) + lane_ : kRopePiece;
    if (lane_ < kHalfPieces + with_rope) ptx::mbarrier_arrive(&smem_.pages.full[buffer][piece]);
  }

  const SparseParams& params_;
  SparsePlan& smem_;
  const int warp_;
  const int lane_;
  QueryLoader query_;
  Phases<kBuffers> phases_;
  int id_;
  uint4 raw_[kPairs];
  float scale_[kPairs];
};

}  // namespace pallas_attn::mla::sm90
