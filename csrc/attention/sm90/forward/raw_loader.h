// The warp that has bytes of a cache of bytes brought to shared memory by the copy engine, keys and values of
// one key tile after the other, two tiles ahead: converter.h makes what wgmma reads of them.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape>
class RawLoader {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr int kKeys = Shape::kKeys;

  __device__ RawLoader(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem,
                       int lane)
      : source_(params), maps_(maps), box_rows_(boxes.rows), raw_(smem.raw), lane_(lane) {}

  // Lanes find the pages of a box each. One begins all copies: what it tells the engine is the same for keys
  // and values but for where they go.
  __device__ void load(const Tile& tile) {
    if (box_rows_ == 0) return;  // converters copy
    const int last = tile.first_key * kKeys;
    int key = last + (tile.num_keys - 1) * kKeys;
    while (key >= last && key >= tile.in_pages) key -= kKeys;
    int page = find(tile, key + lane_ * box_rows_);
#pragma unroll 1
    for (; key >= last; key -= kKeys) {
      const int next = find(tile, key - kKeys + lane_ * box_rows_);
      uint8_t* const keys = open(raw_.keys, key_stage_, key_phases_);
      uint8_t* const values = open(raw_.values, value_stage_, value_phases_);
      int token = source_.in_page(key);
#pragma unroll 1
      for (int row = 0, box = 0; row < kKeys; row += box_rows_, ++box) {
        const int from = __shfl_sync(0xffffffff, page, box);
        if (lane_ == 0) {
          ptx::tma_load_4d(keys + row * raw_.keys.kRawRowBytes, &maps_.key,
                           &raw_.keys.ring.full[key_stage_][0], 0, tile.kv_head, token, from);
          ptx::tma_load_4d(values + row * raw_.values.kRawRowBytes, &maps_.value,
                           &raw_.values.ring.full[value_stage_][0], 0, tile.kv_head, token, from);
        }
        token += box_rows_;
        if (token == source_.params.page_size) token = 0;
      }
      advance(key_stage_, key_phases_);
      advance(value_stage_, value_phases_);
      page = next;
    }
  }

 private:
  using Raw = decltype(Plan::raw);

  // The page of a key; of one that is not in pages, or in none that can be right, that behind the last one:
  // the engine then fills in zeros.
  __device__ __forceinline__ int find(const Tile& tile, int key) const {
    const int none = source_.params.num_pages;
    if (key < 0 || key >= tile.in_pages || lane_ * box_rows_ >= kKeys) return none;
    const int page = source_.page_of(tile, key);
    return page == kBadPage ? none : page;
  }

  template <typename Tiles, typename Phases>
  __device__ __forceinline__ uint8_t* open(Tiles& tiles, int stage, const Phases& phases) {
    ptx::mbarrier_wait(&tiles.ring.empty[stage][0], phases.empty(stage));
    if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(&tiles.ring.full[stage][0], sizeof(tiles.bytes[stage]));
    return tiles.bytes[stage];
  }

  const Source<Role::kKeys> source_;
  const Maps& maps_;
  const int box_rows_;
  Raw& raw_;
  const int lane_;
  Phases<decltype(Raw::keys)::kStages> key_phases_;
  Phases<decltype(Raw::values)::kStages> value_phases_;
  int key_stage_ = 0, value_stage_ = 0;
};

}  // namespace pallas_attn::attention::sm90
