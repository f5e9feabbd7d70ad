// A warp that has the keys of one tile after the other fetched by the copy engine, or the values: from rows,
// or from pages of a multiple of 16 tokens, of 8 where boxes have whole rows.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/filling.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "attention/sm90/forward/woven.h"
#include "ptx/async_copy.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape, Role kRole>
class Loader {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  __device__ Loader(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem, int lane)
      : source_(params),
        map_(kOfKeys ? maps.key : maps.value),
        rows_map_(params.new_key == nullptr ? map_
                  : kOfKeys                 ? maps.new_key
                                            : maps.new_value),
        box_rows_(boxes.rows),
        filling_(smem),
        lane_(lane) {}

  // Each lane has a box of neighbouring tokens, of one page or of rows.
  __device__ void load(const Tile& tile) {
    const int boxes = kKeys / box_rows_;
    const uint32_t box_bytes = box_rows_ * kRowBytes;
    const bool copies = lane_ < boxes;
    const int own = lane_ * box_rows_;
    int key = (tile.first_key + tile.num_keys - 1) * kKeys + own;
    const auto find = [&](int at) {
      return copies && at >= 0 && at < tile.in_pages ? source_.page_of(tile, at) : 0;
    };
    int page = find(key);
#pragma unroll 1
    for (int i = 0; i < tile.num_keys; ++i, key -= kKeys) {
      const int next = find(key - kKeys);
      filling_.wait_until_empty();
      const bool in_pages = key < tile.in_pages;
      // Where pages end within a box, and rows begin.
      const bool joins = copies && in_pages && tile.in_pages - key < box_rows_;
      const bool bad = copies && in_pages && page == kBadPage;
      const bool by_engine = copies && !joins && !(kOfKeys && bad);
      const int engine_boxes = __popc(__ballot_sync(0xffffffff, by_engine));
      if (kOfKeys && engine_boxes < boxes) {
        if (bad && !joins) fill_with_nan(own);
        __syncwarp();
      }
      if (by_engine) {
        const int token = in_pages ? source_.in_page(key) : source_.row_of(tile, key);
        const int batch = in_pages ? page : tile.batch;
        copy(tile, own, token, batch, in_pages);
      }
      const uint32_t joining = __ballot_sync(0xffffffff, joins);
      if (joining != 0) {
        const int lane = __ffs(joining) - 1;
        join(tile, lane * box_rows_, key + (lane - lane_) * box_rows_, __shfl_sync(0xffffffff, page, lane));
      }
      // Copies may have landed by now: a buffer is full when lane 0 has said how much they are, too.
      if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(filling_.full(), engine_boxes * kPieces * box_bytes);
      __syncwarp();
      filling_.advance();
      page = next;
    }
  }

 private:
  // The lane's box, rows [first, first + box_rows_), from `token` on.
  __device__ __forceinline__ void copy(const Tile& tile, int first, int token, int batch, bool in_pages) {
    auto& buffer = filling_.buffer();
    if constexpr (!Shape::kWoven) {
      const CUtensorMap* map = in_pages ? &map_ : &rows_map_;
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::tma_load_4d(buffer.row_of(piece, first), map, filling_.full(), piece * kPieceDims, tile.kv_head,
                         token, batch);
      }
    } else if (in_pages) {
      const WovenHeads heads(source_.strides(), source_.dim(), source_.params.page_size);
      const int piece = tile.kv_head * heads.pieces, eight = tile.kv_head * heads.eights + token / 8;
      // Nobody reads these again.
      if (tile.is_lone) {
        ptx::tma_load_5d(buffer.row_of(0, first), &map_, filling_.full(), ptx::l2_evict_first_policy(), 0, 0,
                         piece, eight, batch);
      } else {
        ptx::tma_load_5d(buffer.row_of(0, first), &map_, filling_.full(), 0, 0, piece, eight, batch);
      }
    } else {
      for (int row = 0; row < box_rows_; row += 8) {
        ptx::tma_load_5d(buffer.row_of(0, first + row), &rows_map_, filling_.full(), 0, token + row, 0,
                         tile.kv_head, batch);
      }
    }
  }

  // The box of rows [first, first + box_rows_), keys from `key` on, by all lanes: some are in `page`, the
  // others in rows.
  __device__ void join(const Tile& tile, int first, int key, int page) {
    constexpr int kRowChunks = kPieces * (kRowBytes / 16);
    const Places places(source_, tile, sizeof(uint16_t), 0, 0);
    auto& buffer = filling_.buffer();
    for (int i = lane_; i < box_rows_ * kRowChunks; i += 32) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const int at = key + row, to_row = first + row;
      const uint32_t to = buffer.chunk_of(chunk, to_row);
      const bool bad = places.leads_nowhere(at, page);
      if (kOfKeys && bad) {
        ptx::store_16_bytes(to, make_uint4(~0u, ~0u, ~0u, ~0u));
        continue;
      }
      const bool exists = chunk * 8 < source_.dim() && places.holds(at) && !bad;
      const char* from = exists ? places.address(at, page) : places.anywhere();
      ptx::copy_async(to, from + (exists ? chunk * 16 : 0), exists);
    }
    ptx::wait_for_copies();
    ptx::fence_async_shared();
    __syncwarp();
  }

  // Scores with the keys of a page that is not there are NaN: so is the result of whoever sees it.
  __device__ void fill_with_nan(int first) {
    for (int row = first; row < first + box_rows_; ++row) {
      for (int chunk = 0; chunk < kPieces * 8; ++chunk) {
        ptx::store_16_bytes(filling_.buffer().chunk_of(chunk, row), make_uint4(~0u, ~0u, ~0u, ~0u));
      }
    }
    ptx::fence_async_shared();
  }

  const Source<kRole> source_;
  const CUtensorMap& map_;
  const CUtensorMap& rows_map_;
  const int box_rows_;
  Filling<Shape, kRole> filling_;
  const int lane_;
};

}  // namespace pallas_attn::attention::sm90
