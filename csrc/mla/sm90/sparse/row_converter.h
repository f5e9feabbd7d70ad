// The third warpgroup over a pool of 656 bytes a token: rows are gathered into registers, their 512 e4m3
// become bf16 there, and go to shared memory as wgmma reads them.
//
// Each of its four warps converts half of its tokens' columns at a time: first those that the tile's owner
// multiplies with, because they are handed back first. While one half is converted, the registers that it
// leaves are filled with the next one, out of the L2, where the row was sent for a tile ago.
#pragma once

#include "mla/sm90/sparse/row_finder.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90 {

class RowConverter : RowFinder<kTokenBytes> {
 public:
  using Ids = ChosenIds<NarrowConsumers>;
  // Every warp; of the rotary piece every lane, by its copies.
  static constexpr int kWriters = kWarpgroupWarps, kRopeWriters = kWarpgroupThreads;

  __device__ RowConverter(const SparseParams& params, const CUtensorMap& query_map, SparsePlan& smem,
                          int warp)
      : RowFinder(params, smem, warp), query_map_(query_map) {}

  __device__ void work_through(int part) {
    walk(query_map_, part, [&](const PageRun& run) { convert_run(run); });
  }

 private:
  static constexpr int kPairs = kWarpTokens / 2;
  static constexpr int kGroups = kLatentDim / kScaleGroup;

  __device__ __forceinline__ void convert_run(const PageRun& run) {
    int now = find_rows(run, run.page_begin);
    fetch_id(run.request, run.page_begin + 1);
    load_scales(now);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_pair(pair, now, half_of(kEven));
    int next = find_rows(run, run.page_begin + 1);
    prefetch<kWarpTokens>(next);
    fetch_id(run.request, run.page_begin + 2);
    Parity buffer = kEven;
#pragma unroll 1
    for (int tile = run.page_begin; tile < run.page_end; ++tile, buffer = other(buffer)) {
      const Half owners = half_of(buffer), others = half_of(other(buffer));
      const uint32_t free_parity = phases_.empty(buffer);

      ptx::mbarrier_wait(&smem_.pages.empty[buffer][owners], free_parity);
      tell_held(buffer, now);
      store_half(buffer, owners, now, others, [] {});

      ptx::mbarrier_wait(&smem_.pages.empty[buffer][others], free_parity);
      copy_rope(buffer, now);
      now = next;
      next = find_rows(run, tile + 2);
      prefetch<kWarpTokens>(next);
      // The next tile's owner is the other warpgroup.
      store_half(buffer, others, now, others, [&] {
        fetch_id(run.request, tile + 3);
        load_scales(now);
      });
      phases_.advance(buffer);
    }
  }

  // Of a pair of tokens and half of their columns a lane has 16: four lanes a piece's row, and eight lanes
  // that store together have the two tokens, whose swizzles differ.
  __device__ int token_of_pair() const { return lane_ / 4 % 2; }
  __device__ int block() const { return lane_ % 4 + lane_ / 8 * 4; }

  __device__ __forceinline__ void load_pair(int pair, int own_row, Half half) {
    const int row = __shfl_sync(0xffffffff, own_row, pair * 2 + token_of_pair());
    const char* from = row_at(row) + half * kHalfDims + block() * 16;
    raw_[pair] = row >= 0 ? ptx::load_16_bytes(from) : make_uint4(0, 0, 0, 0);
  }

  // Of the warp's token lane % 16, the scale of a half's group lane / 16.
  __device__ __forceinline__ void load_scales(int own_row) {
    const char* from = row_at(own_row) + kScalesAt + lane_ / kWarpTokens * sizeof(float);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      scale_[half] = own_row >= 0 ? ptx::load_float(from + half * (kGroups / 2) * sizeof(float)) : 0.0f;
    }
  }

  // What was loaded becomes this half of the tile in `buffer`; its registers are filled again, and what
  // fetch_more() sends for is under way with them.
  template <typename FetchMore>
  __device__ __forceinline__ void store_half(Parity buffer, Half half, int next_row, Half next_half,
                                             FetchMore fetch_more) {
    const int piece = first_piece(half) + lane_ / 8;
    const uint32_t rows = ptx::shared_address(smem_.sK[buffer][piece][warp_ * kWarpTokens + token_of_pair()]);
    const uint32_t chunk = lane_ % 4 * 2 ^ token_of_pair();
    // All at once, so that none is waited for.
    float scale[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int from = lane_ / kWarpTokens * kWarpTokens + pair * 2 + token_of_pair();
      scale[pair] = __shfl_sync(0xffffffff, half == kLow ? scale_[kLow] : scale_[kHigh], from);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t at = rows + pair * (2 * kRowBytes) + ((chunk ^ (pair * 2 % 8)) << 4);
      const uint4 raw = raw_[pair];
      ptx::store_16_bytes(at, dequantize_eight(raw.x, raw.y, scale[pair]));
      ptx::store_16_bytes(at ^ 16, dequantize_eight(raw.z, raw.w, scale[pair]));
      if (pair == 0) fetch_more();
      load_pair(pair, next_row, next_half);
    }
    __syncwarp();
    if (lane_ < kHalfPieces) ptx::mbarrier_arrive(&smem_.pages.full[buffer][first_piece(half) + lane_]);
  }

  const CUtensorMap& query_map_;
  uint4 raw_[kPairs];
  float scale_[kHalves];
};

}  // namespace pallas_attn::mla::sm90
