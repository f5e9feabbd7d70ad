// The warp that has bytes of a cache of bytes brought to shared memory, keys and values of one key tile after
// the other, some tiles ahead: converters.h makes what wgmma reads of them. By the copy engine, a box of
// neighbouring tokens a lane; or where pages are too short for its boxes, by its threads.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/async_copy.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape>
class RawLoader {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr int kKeys = Shape::kKeys;

  // Who arrives when bytes are there: every lane behind its copies, and lane 0 for what lanes stored and what
  // the copy engine brings.
  static constexpr int kWriters = 33;

  __device__ RawLoader(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem,
                       int lane)
      : keys_(params), values_(params), maps_(maps), box_rows_(boxes.rows), smem_(smem), lane_(lane) {}

  __device__ void load(const Tile& tile) {
    for (int i = tile.first_key + tile.num_keys - 1; i >= tile.first_key; --i) {
      const int key = i * kKeys;
      // Keys in rows are there as they should be.
      if (key >= tile.in_pages) continue;
      int pages[kBlocks];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int at = key + j * 32 + lane_;
        pages[j] = at < tile.in_pages ? keys_.page_of(tile, at) : keys_.params.num_pages;
      }
      bring(keys_, maps_.key, tile, key, pages);
      bring(values_, maps_.value, tile, key, pages);
    }
  }

 private:
  static constexpr int kBlocks = (kKeys + 31) / 32;

  template <Role kRole>
  __device__ __forceinline__ void bring(const Source<kRole>& source, const CUtensorMap& map, const Tile& tile,
                                        int key, const int (&pages)[kBlocks]) {
    constexpr int kPieces = kRole == Role::kKeys ? Shape::kPieces : Shape::kValuePieces;
    constexpr int kRawRowBytes = kPieces * kPieceDims;
    auto& raw = smem_.raw;
    ptx::mbarrier_wait(&raw.ring.empty[stage_][0], phases_.empty(stage_));
    uint64_t* const full = &raw.ring.full[stage_][0];
    if (kRole == Role::kKeys) name_bad(pages);
    tell_scales(source, tile, pages);
    uint32_t engine_bytes = 0;
    if (box_rows_ > 0) {
      // Pages that are not there lie behind the last one: zeros.
      const int boxes = kKeys / box_rows_, own = lane_ * box_rows_;
      const int page = held(pages, own);
      if (lane_ < boxes) {
        ptx::tma_load_4d(raw.bytes[stage_] + own * kRawRowBytes, &map, full, 0, tile.kv_head,
                         source.in_page(key + own), page < 0 ? source.params.num_pages : page);
      }
      engine_bytes = kKeys * kRawRowBytes;
    } else {
      copy<kRole, kPieces>(source, tile, key, pages);
    }
    ptx::arrive_behind_copies(full);
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(full, engine_bytes);
    advance(stage_, phases_);
  }

  // Of row `row`, which a lane asks for.
  static __device__ __forceinline__ int held(const int (&pages)[kBlocks], int row) {
    int page = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int one = __shfl_sync(0xffffffff, pages[j], row & 31);
      if (row / 32 == j) page = one;
    }
    return page;
  }

  __device__ __forceinline__ void name_bad(const int (&pages)[kBlocks]) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint32_t bad = __ballot_sync(0xffffffff, pages[j] == kBadPage);
      if (lane_ == 0) smem_.raw.bad[stage_][j] = bad;
    }
  }

  // What each key is multiplied by, or each value, where that differs.
  template <Role kRole>
  __device__ __forceinline__ void tell_scales(const Source<kRole>& source, const Tile& tile,
                                              const int (&pages)[kBlocks]) {
    const ForwardParams& params = source.params;
    const bool by_page = source.kOfKeys ? params.key_scale_by_page : params.value_scale_by_page;
    if (!by_page && params.new_key == nullptr) return;
    const float* const scales = source.kOfKeys ? params.key_scale : params.value_scale;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int row = j * 32 + lane_;
      if (row >= kKeys) break;
      const bool exists = static_cast<uint32_t>(pages[j]) < static_cast<uint32_t>(params.num_pages);
      const int64_t of_page = by_page ? int64_t{pages[j]} * params.num_kv_heads : 0;
      smem_.raw.scales[stage_][row] = exists ? __ldg(scales + of_page + tile.kv_head) : 1.0f;
    }
  }

  // 16 bytes at a time: zeros where there is nothing, or an element behind a head's last.
  template <Role kRole, int kPieces>
  __device__ __forceinline__ void copy(const Source<kRole>& source, const Tile& tile, int key,
                                       const int (&pages)[kBlocks]) {
    constexpr int kChunks = kPieces * (kPieceDims / 16);
    static_assert(kKeys * kChunks % 32 == 0);
    const Places<kRole> places(source, tile, 1, 0, 0);
    const uint32_t to = ptx::shared_address(smem_.raw.bytes[stage_]);
#pragma unroll 2
    for (int i = lane_; i < kKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int page = held(pages, row);
      const bool exists = static_cast<uint32_t>(page) < static_cast<uint32_t>(source.params.num_pages) &&
                          chunk * 16 < source.dim();
      const char* const from = exists ? places.in_pool(key + row, page) + chunk * 16 : places.anywhere();
      ptx::copy_async(to + i * 16, from, exists);
    }
  }

  const Source<Role::kKeys> keys_;
  const Source<Role::kValues> values_;
  const Maps& maps_;
  const int box_rows_;
  Plan& smem_;
  const int lane_;
  Phases<Shape::kRawStages> phases_;
  int stage_ = 0;
};

}  // namespace pallas_attn::attention::sm90
