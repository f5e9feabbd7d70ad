// The third warpgroup over a pool of 656 bytes a token where the heads of a query token are those of two
// CTAs: a cluster, each of whose CTAs converts half of every tile's rows, and writes them into both.
//
// What is written into the other CTA is counted there, in bytes, by the barrier of the piece; so nobody waits
// for it but who multiplies with it. A half of a buffer is free when the readers of both CTAs have said so.
// (FlashMLA's decode kernel shares its conversion so, too.)
#pragma once

#include "mla/sm90/sparse/row_finder.h"
#include "ptx/cluster.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90 {

class PairConverter : RowFinder<kTokenBytes> {
  // Half as many tokens leave the math the registers that it has beside a copier.
  struct Registers {
    static constexpr int kRegisters = 224, kFeederRegisters = 56;
    static constexpr int kQuerySteps = 0;
    static constexpr bool kOwnProbabilities = true, kMerges = false;
  };

 public:
  using Ids = ChosenIds<Registers, 2>;
  // Every warp, and the bytes of its fellow; of the rotary piece every lane, by its copies.
  static constexpr int kWriters = kWarpgroupWarps, kRopeWriters = kWarpgroupThreads;

  __device__ PairConverter(const SparseParams& params, const CUtensorMap& query_map, SparsePlan& smem,
                           int warp)
      : RowFinder(params, smem, warp),
        query_map_(query_map),
        first_token_(ptx::cluster_rank() * kTokens),
        to_other_(ptx::address_in(ptx::shared_address(&smem), ptx::cluster_rank() ^ 1) -
                  ptx::shared_address(&smem)) {}

  __device__ void work_through(int part) {
    walk(query_map_, part, [&](const PageRun& run) { convert_run(run); });
  }

 private:
  // Of the warp's tokens of a tile, those that it converts. A row of a half is 8 bytes a lane.
  static constexpr int kTokens = kWarpTokens / Ids::kCtas;
  static constexpr int kHalfGroups = kLatentDim / kScaleGroup / kHalves;
  static_assert(kTokens == 8 && kHalfDims == 32 * 8 && kTokens * kHalfGroups * kHalves == 32);

  __device__ __forceinline__ void convert_run(const PageRun& run) {
    int now = find_rows(run, run.page_begin);
    fetch_id(run.request, run.page_begin + 1);
    scale_ = load_scale(now);
    load_half(now, half_of(kEven));
    int next = find_rows(run, run.page_begin + 1);
    prefetch<kTokens>(converted_row(next));
    fetch_id(run.request, run.page_begin + 2);
    Parity buffer = kEven;
#pragma unroll 1
    for (int tile = run.page_begin; tile < run.page_end; ++tile, buffer = other(buffer)) {
      const Half owners = half_of(buffer), others = half_of(other(buffer));
      const uint32_t free_parity = phases_.empty(buffer);

      ptx::mbarrier_wait(&smem_.pages.empty[buffer][owners], free_parity);
      tell_held(buffer, now);
      store_half(buffer, owners, now, others);

      ptx::mbarrier_wait(&smem_.pages.empty[buffer][others], free_parity);
      copy_rope(buffer, now);
      // The next tile's owner is the other warpgroup.
      store_half(buffer, others, next, others);

      scale_ = load_scale(next);
      now = next;
      next = find_rows(run, tile + 2);
      prefetch<kTokens>(converted_row(next));
      fetch_id(run.request, tile + 3);
      phases_.advance(buffer);
    }
  }

  __device__ __forceinline__ void load(int token, int own_row, Half half) {
    const int row = __shfl_sync(0xffffffff, own_row, first_token_ + token);
    const char* from = row_at(row) + half * kHalfDims + lane_ * 8;
    raw_[token] = row >= 0 ? ptx::load_8_bytes(from) : make_uint2(0, 0);
  }

  __device__ __forceinline__ void load_half(int own_row, Half half) {
#pragma unroll
    for (int token = 0; token < kTokens; ++token) load(token, own_row, half);
  }

  // The row of token lane % 8 of those that are converted here.
  __device__ __forceinline__ int converted_row(int own_row) const {
    return __shfl_sync(0xffffffff, own_row, first_token_ + lane_ % kTokens);
  }

  // Of token lane % 8 the scale of group lane / 8.
  __device__ __forceinline__ float load_scale(int own_row) const {
    const int row = converted_row(own_row);
    const char* from = row_at(row) + kScalesAt + lane_ / kTokens * sizeof(float);
    return row >= 0 ? ptx::load_float(from) : 0.0f;
  }

  // What was loaded becomes this half of the tile in both CTAs' `buffer`; its registers are filled again.
  __device__ __forceinline__ void store_half(Parity buffer, Half half, int next_row, Half next_half) {
    const int piece = first_piece(half) + lane_ / 8;
    const uint32_t first =
        ptx::shared_address(smem_.sK[buffer][piece][warp_ * kWarpTokens + first_token_]) + (lane_ % 8 << 4);
    const uint32_t full = ptx::shared_address(&smem_.pages.full[buffer][piece]) + to_other_;
    // All at once, so that none is waited for.
    float scale[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      scale[token] = __shfl_sync(0xffffffff, scale_, (half * kHalfGroups + lane_ / 16) * kTokens + token);
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      const uint32_t at = (first ^ token << 4) + token * kRowBytes;
      const uint4 row = dequantize_eight(raw_[token].x, raw_[token].y, scale[token]);
      ptx::store_16_bytes(at, row);
      ptx::store_async_16_bytes(at + to_other_, row, full);
      load(token, next_row, next_half);
    }
    __syncwarp();
    // As many bytes come from the other CTA.
    if (lane_ < kHalfPieces) {
      ptx::mbarrier_arrive_expect_bytes(&smem_.pages.full[buffer][first_piece(half) + lane_],
                                        kTokens * kRowBytes);
    }
  }

  const CUtensorMap& query_map_;
  const int first_token_;
  const uint32_t to_other_;  // from an address here to the same in the other CTA
  uint2 raw_[kTokens];
  float scale_;
};

}  // namespace pallas_attn::mla::sm90
