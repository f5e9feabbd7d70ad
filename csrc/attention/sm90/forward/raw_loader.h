// The warp that has bytes of a cache of bytes brought to shared memory, two key tiles ahead: converter.h
// makes what wgmma reads of them. By the copy engine, a box of neighbouring tokens a lane; or where pages are
// too short for its boxes, by its threads.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/raw_tiles.h"
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
      : keys_(params),
        values_(params),
        maps_(maps),
        box_rows_(boxes.rows),
        smem_(smem),
        lane_(lane),
        raw_keys_(smem),
        raw_values_(smem) {}

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
      raw_keys_.wait_until_empty();
      name_bad(pages);
      bring(keys_, raw_keys_, maps_.key, tile, key, pages);
      raw_values_.wait_until_empty();
      bring(values_, raw_values_, maps_.value, tile, key, pages);
    }
  }

 private:
  static constexpr int kBlocks = (kKeys + 31) / 32;
  using Pages = int[kBlocks];  // of the lane's keys, one of each 32

  template <Role kRole>
  __device__ __forceinline__ void bring(const Source<kRole>& source, RawPlace<Shape, kRole>& raw,
                                        const CUtensorMap& map, const Tile& tile, int key,
                                        const Pages& pages) {
    tell_scales(source, raw.scales(), tile, pages);
    uint32_t engine_bytes = 0;
    if (box_rows_ > 0) {
      // Pages that are not there lie behind the last one: zeros.
      const int own = lane_ * box_rows_, page = page_of(own, pages);
      auto& bytes = raw.tiles().bytes[raw.stage()];
      if (own < kKeys) {
        ptx::tma_load_4d(bytes + own * raw.tiles().kRawRowBytes, &map, raw.full(), 0, tile.kv_head,
                         source.in_page(key + own), page < 0 ? source.params.num_pages : page);
      }
      engine_bytes = sizeof(bytes);
    } else {
      copy(source, raw, tile, key, pages);
    }
    ptx::arrive_behind_copies(raw.full());
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(raw.full(), engine_bytes);
    raw.advance();
  }

  // Each lane asks for that of a row.
  static __device__ __forceinline__ int page_of(int row, const Pages& pages) {
    int page = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int one = __shfl_sync(0xffffffff, pages[j], row & 31);
      if (row / 32 == j) page = one;
    }
    return page;
  }

  __device__ __forceinline__ void name_bad(const Pages& pages) {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint32_t bad = __ballot_sync(0xffffffff, pages[j] == kBadPage);
      if (lane_ == 0) smem_.raw.bad[raw_keys_.stage()][j] = bad;
    }
  }

  template <Role kRole>
  __device__ __forceinline__ void tell_scales(const Source<kRole>& source, float* to, const Tile& tile,
                                              const Pages& pages) {
    const ForwardParams& params = source.params;
    const bool by_page = source.kOfKeys ? params.key_scale_by_page : params.value_scale_by_page;
    if (!by_page && params.new_key == nullptr) return;
    const float* const scales = source.kOfKeys ? params.key_scale : params.value_scale;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int row = j * 32 + lane_;
      if (row >= kKeys) break;
      const int64_t of_page = by_page ? int64_t{pages[j]} * params.num_kv_heads : 0;
      to[row] = exists(source, pages[j]) ? __ldg(scales + of_page + tile.kv_head) : 1.0f;
    }
  }

  // 16 bytes at a time: zeros where there is nothing, or an element behind a head's last.
  template <Role kRole>
  __device__ __forceinline__ void copy(const Source<kRole>& source, RawPlace<Shape, kRole>& raw,
                                       const Tile& tile, int key, const Pages& pages) {
    constexpr int kChunks = RawPlace<Shape, kRole>::Tiles::kRawRowBytes / 16;
    static_assert(kKeys * kChunks % 32 == 0);
    const Places<kRole> places(source, tile, 1, 0, 0);
    const uint32_t to = raw.bytes();
#pragma unroll 2
    for (int i = lane_; i < kKeys * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks, page = page_of(row, pages);
      const bool copied = exists(source, page) && chunk * 16 < source.dim();
      const char* const from = copied ? places.in_pool(key + row, page) + chunk * 16 : places.anywhere();
      ptx::copy_async(to + i * 16, from, copied);
    }
  }

  template <Role kRole>
  static __device__ __forceinline__ bool exists(const Source<kRole>& source, int page) {
    return static_cast<uint32_t>(page) < static_cast<uint32_t>(source.params.num_pages);
  }

  const Source<Role::kKeys> keys_;
  const Source<Role::kValues> values_;
  const Maps& maps_;
  const int box_rows_;
  Plan& smem_;
  const int lane_;
  RawPlace<Shape, Role::kKeys> raw_keys_;
  RawPlace<Shape, Role::kValues> raw_values_;
};

}  // namespace pallas_attn::attention::sm90
