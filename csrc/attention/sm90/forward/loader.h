// A warp that has the keys of one tile after the other fetched, or the values: by the copy engine, from rows
// or from pages of a multiple of 8 tokens, else by copies of 16 bytes a thread.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "ptx/async_copy.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90 {

enum class Role { kKeys, kValues };

template <typename Shape, Role kRole>
class Loader {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kStages = kOfKeys ? Shape::kKeyStages : Shape::kValueStages;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  // Who arrives when a buffer is full: lane 0, and every lane behind its own copies.
  static __device__ int writers(const Boxes& boxes) { return boxes.rows > 0 ? 1 : 33; }

  __device__ Loader(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem, int lane)
      : params_(params),
        map_(kOfKeys ? maps.key : maps.value),
        box_rows_(boxes.rows),
        smem_(smem),
        lane_(lane),
        paged_(params.block_tables != nullptr) {}

  __device__ void work() {
    Phases<kToldTiles> tile_phases;
    for (int told = 0;; told = next_told(told)) {
      ptx::mbarrier_wait(&smem_.told.full[told][0], tile_phases.full(told));
      tile_phases.advance(told);
      const Tile& tile = smem_.tiles[told];
      if (tile.kv_head < 0) return;
      if (box_rows_ > 0) {
        load_boxes(tile);
      } else {
        gather(tile);
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.empty[told][0]);
    }
  }

 private:
  // A page id that cannot be right becomes this; one behind the sequence's end becomes num_pages, which the
  // copy engine fills with zeros.
  static constexpr int kBadPage = -1;

  __device__ auto& buffer() {
    if constexpr (kOfKeys) {
      return smem_.sK[stage_];
    } else {
      return smem_.sV[stage_];
    }
  }
  __device__ uint64_t* full() {
    if constexpr (kOfKeys) {
      return &smem_.keys.full[stage_][0];
    } else {
      return &smem_.values.full[stage_][0];
    }
  }
  __device__ void wait_until_empty() {
    if constexpr (kOfKeys) {
      ptx::mbarrier_wait(&smem_.keys.empty[stage_][0], phases_.empty(stage_));
    } else {
      ptx::mbarrier_wait(&smem_.values.empty[stage_][0], phases_.empty(stage_));
    }
  }
  __device__ void advance() {
    phases_.advance(stage_);
    stage_ = (stage_ + 1) % kStages;
  }

  // The page that holds a key of the tile's sequence.
  __device__ __forceinline__ int page_of(const Tile& tile, int key) const {
    if (key >= tile.k_len) return params_.num_pages;
    const int page = __ldg(params_.block_tables + static_cast<int64_t>(tile.seq) * params_.max_pages +
                           key / params_.page_size);
    return page < 0 || page >= params_.num_pages ? kBadPage : page;
  }

  // Each lane has a box of neighbouring tokens, of one page.
  __device__ void load_boxes(const Tile& tile) {
    const int boxes = kKeys / box_rows_;
    const uint32_t box_bytes = box_rows_ * kRowBytes;
    const bool copies = lane_ < boxes;
    const int own = lane_ * box_rows_;
    int key = (tile.first_key + tile.num_keys - 1) * kKeys + own;
    int page = paged_ && copies ? page_of(tile, key) : 0;
#pragma unroll 1
    for (int i = 0; i < tile.num_keys; ++i, key -= kKeys) {
      const int next = paged_ && copies && key >= kKeys ? page_of(tile, key - kKeys) : 0;
      wait_until_empty();
      const bool bad = paged_ && copies && page == kBadPage;
      const int bad_boxes = __popc(__ballot_sync(0xffffffff, bad));
      if (kOfKeys && bad_boxes > 0) {
        if (bad) fill_with_nan(own, box_rows_);
        __syncwarp();
      }
      if (lane_ == 0) {
        const int bytes = (boxes - (kOfKeys ? bad_boxes : 0)) * kPieces * box_bytes;
        ptx::mbarrier_arrive_expect_bytes(full(), bytes);
      }
      __syncwarp();
      if (copies && !(kOfKeys && bad)) {
        const int token = paged_ ? key % params_.page_size : tile.k_begin + key;
        const int batch = paged_ ? page : tile.k_batch;
        for (int piece = 0; piece < kPieces; ++piece) {
          ptx::tma_load_4d(buffer()[piece][own], &map_, full(), piece * kPieceDims, tile.kv_head, token,
                           batch);
        }
      }
      advance();
      page = next;
    }
  }

  // Scores with the keys of a page that is not there are NaN: so is the result of whoever sees it.
  __device__ void fill_with_nan(int first, int count) {
    for (int piece = 0; piece < kPieces; ++piece) {
      uint4* rows = reinterpret_cast<uint4*>(buffer()[piece][first]);
      const int chunks = count * (kRowBytes / 16);
      for (int i = 0; i < chunks; ++i) rows[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    }
    ptx::fence_async_shared();
  }

  // Where a token of the tile's sequence lies in the pool, in chunks of 16 bytes: 64 GB are enough for any.
  static constexpr uint32_t kNowhere = ~0u, kOfBadPage = ~1u;
  __device__ __forceinline__ uint32_t place_of(const Tile& tile, const Strides& strides, int key) const {
    const int page = page_of(tile, key);
    if (page == kBadPage) return kOfBadPage;
    if (page == params_.num_pages) return kNowhere;
    return static_cast<uint32_t>((page * strides.batch + key % params_.page_size * strides.token) / 8);
  }

  // Each lane finds some tokens; eight of them copy a piece's row.
  __device__ void gather(const Tile& tile) {
    constexpr int kRowLanes = kRowBytes / 16, kRowsAtOnce = 32 / kRowLanes, kTurns = 32 / kRowsAtOnce;
    constexpr int kHeld = (kKeys + 31) / 32;  // tokens of a lane
    const Strides strides = kOfKeys ? params_.key_strides : params_.value_strides;
    const int chunk = lane_ % kRowLanes, of_rows = lane_ / kRowLanes;
    const uint4* pool = static_cast<const uint4*>(kOfKeys ? params_.key : params_.value) +
                        tile.kv_head * strides.head / 8 + chunk;
    const int dim = (kOfKeys ? params_.head_dim : params_.value_dim) - chunk * 8;
    uint32_t next[kHeld];
    const auto find = [&](int first) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) next[j] = place_of(tile, strides, first + j * 32 + lane_);
    };
    find((tile.first_key + tile.num_keys - 1) * kKeys);
#pragma unroll 1
    for (int i = tile.num_keys - 1; i >= 0; --i) {
      uint32_t now[kHeld];
#pragma unroll
      for (int j = 0; j < kHeld; ++j) now[j] = next[j];
      if (i > 0) find((tile.first_key + i - 1) * kKeys);
      wait_until_empty();
      // A row's number modulo 8 swizzles its chunks: rows of one lane are 4 apart.
      const uint32_t base = ptx::shared_address(buffer()[0]) + of_rows * kRowBytes;
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {
        // All at once, for a copy keeps what follows it from being moved in front of it.
        uint32_t from[kTurns];
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          from[turn] = __shfl_sync(0xffffffff, now[j], turn * kRowsAtOnce + of_rows);
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          const int row = j * 32 + turn * kRowsAtOnce;
          if (row >= kKeys) break;
          const uint32_t to = base + row * kRowBytes + ((chunk ^ ((row + of_rows) & 7)) << 4);
          const bool exists = from[turn] < kOfBadPage;
          const uint4* source = pool + (exists ? from[turn] : 0);
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            const bool copied = exists && piece * kPieceDims < dim;
            ptx::copy_async(to + piece * (kKeys * kRowBytes), copied ? source + piece * kRowLanes : pool,
                            copied);
          }
        }
      }
      if constexpr (kOfKeys) fill_bad_rows(now);
      ptx::arrive_behind_copies(full());
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(full());
      advance();
    }
  }

  // Rows of pages that are not there, over the zeros that were copied instead.
  template <int kHeld>
  __device__ __forceinline__ void fill_bad_rows(const uint32_t (&places)[kHeld]) {
    bool bad = false;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) bad |= places[j] == kOfBadPage;
    if (!__any_sync(0xffffffff, bad)) return;
    ptx::wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (places[j] == kOfBadPage) fill_with_nan(j * 32 + lane_, 1);
    }
  }

  const ForwardParams& params_;
  const CUtensorMap& map_;
  const int box_rows_;
  Plan& smem_;
  const int lane_;
  const bool paged_;
  Phases<kStages> phases_;
  int stage_ = 0;
};

}  // namespace pallas_attn::attention::sm90
