// The feeder of caches in 656 bytes a token: four warps that hold a page in registers, on its way from device
// memory, and write it as bf16 where wgmma reads it.
//
//   registers of a page    half of the page        while it is converted    behind that
//   first_                 the one freed first     second_ is in flight     loads the next page's
//   second_                the other one           first_ is in flight      loads the next page's
//
// So a buffer is taken for as long as conversion and products need it, not for as long as memory does. ptxas
// gives all loads one scoreboard, though: who waits for first_ waits for second_ too. A page's rotary piece
// is bf16 and comes by the copy engine; the L2 is told of it with the rest of the page, so that it does not
// come late.
#pragma once

#include "mla/sm90/dense/pages.h"
#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90 {

// Pages that a feeder of many registers brings.
class QuantizedPages : public TablePages {
 public:
  using Budget = NarrowConsumers;
  using TablePages::TablePages;
};

constexpr int kFeederWarps = kWarpgroupWarps;
// Of a page, each warp has 16 tokens; of a half, each of its loads two tokens of 256 bytes: 16 bytes a lane,
// which lie so that a quarter of a warp then writes 128 bytes into different banks.
constexpr int kFeederTokens = kPageTokens / kFeederWarps;
constexpr int kTokensAtOnce = 2;
constexpr int kHalfLoads = kFeederTokens / kTokensAtOnce;

// 16 tokens of half a page, as a warp's lanes hold them. A lane's 16 bytes are of one scale's group.
struct HalfRegisters {
  uint4 bytes[kHalfLoads];
  // Of the half's group lane / 16. Four neighbouring lanes keep those of the tokens that they have bytes of,
  // of the load lane % 4 and of the one four further on.
  float scale[2];
};

class Dequantizer {
 public:
  __device__ Dequantizer(const DecodeParams& params, const CUtensorMap& query_map,
                         const CUtensorMap& rope_map, SmemPlan& smem, int warp, int lane)
      : params_(params),
        query_map_(query_map),
        rope_map_(rope_map),
        smem_(smem),
        warp_(warp),
        lane_(lane),
        token_stride_(params.num_kv_heads * kTokenBytes),
        policy_(ptx::l2_evict_first_policy()),
        walker_(params, blockIdx.y),
        source_(params, rope_map, policy_, blockIdx.z, lane) {}

  __device__ __forceinline__ void work_through() {
    PageAt next;
    bool more = advance(next);
    if (more) {
      load(first_, next, owned_first(next));
      load(second_, next, other(owned_first(next)));
      prefetch_rope(next);
    }
    while (more) {
      load_queries();
      const PageAt page = next;
      const Half owners = owned_first(page), others = other(owners);
      const uint32_t free_parity = page_phases_.empty(page.buffer);
      more = advance(next);

      ptx::mbarrier_wait(&smem_.pages.empty[page.buffer][owners], free_parity);
      if (leads()) smem_.bad_page[page.buffer] = !source_.exists(page.index);
      convert(first_, page.buffer, owners);
      if (more) load(first_, next, owned_first(next));

      ptx::mbarrier_wait(&smem_.pages.empty[page.buffer][others], free_parity);
      if (leads()) copy_rope(page);
      convert(second_, page.buffer, others);
      if (more) {
        load(second_, next, other(owned_first(next)));
        prefetch_rope(next);
      }
      page_phases_.advance(page.buffer);
    }
    load_queries();
  }

 private:
  // A page and where it goes.
  struct PageAt {
    int index;  // in the pool
    Parity buffer;
  };

  static __device__ __forceinline__ Half owned_first(const PageAt& page) { return half_of(page.buffer); }
  static __device__ __forceinline__ Half other(Half half) { return half == kLow ? kHigh : kLow; }

  // The next page of this part's runs; false behind the last one.
  __device__ __forceinline__ bool advance(PageAt& page) {
    while (place_ >= run_.page_end) {
      if (walker_.done()) return false;
      source_.open(walker_.request(), walker_.page_begin());
      walker_.fetch();
      run_ = walker_.run();
      place_ = run_.page_begin;
    }
    // Of a request whose length cannot be, no page exists.
    page.index = run_.bad_length ? -1 : source_.page(place_);
    page.buffer = (place_ - run_.page_begin) % kBuffers == 0 ? kEven : kOdd;
    ++place_;
    return true;
  }

  // Of all runs up to this one: those without pages have a query too.
  __device__ __forceinline__ void load_queries() {
    for (; walker_.first_request() + queries_ < walker_.request(); ++queries_) {
      if (warp_ != 0) continue;
      ptx::mbarrier_wait(smem_.query.empty[0], ~queries_ & 1);
      if (lane_ == 0) {
        ptx::mbarrier_arrive_expect_bytes(smem_.query.full[0], kTileBytes);
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece) {
          ptx::tma_load_3d(smem_.sQ[piece], &query_map_, smem_.query.full[0], policy_, piece * kPieceDims,
                           row_tile() * kTileRows,
                           (walker_.first_request() + queries_) * params_.num_kv_heads + kv_head());
        }
      }
      __syncwarp();
    }
  }

  // What a page outside the pool leaves in the registers is flagged, and its probabilities NaN.
  __device__ __forceinline__ void load(HalfRegisters& half, const PageAt& page, Half which) {
    if (!source_.exists(page.index)) return;
    // Places within the page, whose bytes 32 bits count: 64-bit ones would spill.
    const uint32_t stride = token_stride_, first = warp_ * kFeederTokens;
    const uint32_t scale = (first + lane_ % 4 * kTokensAtOnce + token_in_pair()) * stride + kScalesAt +
                           (which * 2 + lane_ / 16) * 4;
    const uint32_t bytes =
        (first + token_in_pair()) * stride + which * kHalfDims + lane_ / 8 * kPieceDims + lane_ % 4 * 16;
    const char* page_at = static_cast<const char*>(params_.latent_cache) + kv_head() * kTokenBytes +
                          static_cast<int64_t>(page.index) * (kPageTokens * stride);
    half.scale[0] = ptx::load_float(page_at + scale, policy_);
    half.scale[1] = ptx::load_float(page_at + (scale + kFeederTokens / 2 * stride), policy_);
    const char* from = page_at + bytes;
#pragma unroll
    for (int i = 0; i < kHalfLoads; ++i) {
      half.bytes[i] = ptx::load_16_bytes(from, policy_);
      from += kTokensAtOnce * stride;
    }
  }

  __device__ __forceinline__ void convert(const HalfRegisters& half, Parity buffer, Half which) {
    const uint32_t token = warp_ * kFeederTokens + token_in_pair();
    // Chunks of 16 bytes lie under the swizzle, of which this lane has an even one and the next. An even
    // token's number keeps the lowest bit.
    const uint32_t first_chunk = lane_ % 4 * 2 ^ token_in_pair();
    const uint32_t lane_address = ptx::shared_address(smem_.sK[buffer][first_piece(which) + lane_ / 8]) +
                                  token * kRowBytes + first_chunk * 16;
#pragma unroll
    for (int i = 0; i < kHalfLoads; ++i) {
      const float scale = __shfl_sync(0xffffffff, half.scale[i / 4], i % 4, 4);
      const uint4 v = half.bytes[i];
      const uint32_t row = (lane_address ^ (i * kTokensAtOnce & 6) * 16) + i * kTokensAtOnce * kRowBytes;
      ptx::store_16_bytes(row, dequantize_eight(v.x, v.y, scale));
      ptx::store_16_bytes(row ^ 16, dequantize_eight(v.z, v.w, scale));
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_ < kHalfPieces) ptx::mbarrier_arrive(&smem_.pages.full[buffer][first_piece(which) + lane_]);
  }

  __device__ __forceinline__ bool leads() const { return warp_ == 0 && lane_ == 0; }
  __device__ __forceinline__ uint32_t token_in_pair() const { return lane_ / 4 % 2; }
  static __device__ __forceinline__ int kv_head() { return blockIdx.z; }
  static __device__ __forceinline__ int row_tile() { return blockIdx.x; }
  __device__ __forceinline__ int rope_byte() const { return kv_head() * kTokenBytes + kRopeAt; }

  __device__ __forceinline__ void copy_rope(const PageAt& page) {
    uint64_t* full = &smem_.pages.full[page.buffer][kRopePiece];
    ptx::mbarrier_arrive_expect_bytes(full, kPieceBytes);
    ptx::tma_load_3d(smem_.sK[page.buffer][kRopePiece], &rope_map_, full, policy_, rope_byte(), 0,
                     page.index);
  }

  __device__ __forceinline__ void prefetch_rope(const PageAt& page) {
    if (leads()) ptx::tma_prefetch_3d(&rope_map_, rope_byte(), 0, page.index);
  }

  const DecodeParams& params_;
  const CUtensorMap& query_map_;
  const CUtensorMap& rope_map_;
  SmemPlan& smem_;
  const int warp_;
  const uint32_t lane_;
  const int token_stride_;
  const uint64_t policy_;
  RunWalker<QuantizedPages> walker_;
  QuantizedPages source_;
  PageRun run_ = {};
  int place_ = 0;
  int queries_ = 0;  // loaded so far
  Phases<kBuffers> page_phases_;
  HalfRegisters first_ = {}, second_ = {};
};

}  // namespace pallas_attn::mla::sm90
