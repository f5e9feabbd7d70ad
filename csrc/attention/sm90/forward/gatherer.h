// Warps that have the keys of one tile after the other copied by their threads, or the values, 16 bytes each: where
// pages are too short for the copy engine.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/loader.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/async_copy.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::attention::sm90 {

// One of kWarps. Eight lanes copy a piece's row, and a warp four rows at a time, as do its neighbours.
template <typename Shape, Role kRole, int kWarps>
class Gatherer {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  // Who arrives when a buffer is full: every lane behind its copies, and lane 0 for what lanes stored.
  static constexpr int kWriters = 33 * kWarps;

  __device__ Gatherer(const ForwardParams& params, Plan& smem, int warp, int lane)
      : source_(params), num_pages_(params.num_pages), smem_(smem), filling_(smem), warp_(warp), lane_(lane) {}

  __device__ void work() {
    Phases<kToldTiles> tile_phases;
    for (int told = 0;; told = next_told(told)) {
      ptx::mbarrier_wait(&smem_.told.full[told][0], tile_phases.full(told));
      tile_phases.advance(told);
      const Tile& tile = smem_.tiles[told];
      if (tile.kv_head < 0) return;
      load(tile);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.empty[told][0]);
    }
  }

 private:
  static constexpr int kRowLanes = kRowBytes / 16, kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kTurnRows = kRowsAtOnce * kWarps, kTurns = kKeys / kTurnRows;
  static_assert(kKeys % kTurnRows == 0);
  // Table entries that are looked up at a time, ahead of the copies that need them.
  static constexpr int kLookedUp = kTurns % 8 == 0 ? 8 : kTurns % 6 == 0 ? 6 : 4;
  static_assert(kTurns % kLookedUp == 0);

  __device__ void load(const Tile& tile) {
    const int of_rows = warp_ * kRowsAtOnce + lane_ / kRowLanes;
    const int first = tile.first_key * kKeys + of_rows;  // of the lane's
    int key = first + (tile.num_keys - 1) * kKeys;
    int next[kLookedUp];
    const auto look_up = [&](int from) {
#pragma unroll
      for (int j = 0; j < kLookedUp; ++j) {
        const int at = from + j * kTurnRows;
        next[j] = at < min(tile.in_pages, tile.k_len) ? source_.entry_of(tile, at) : 0;
      }
    };
    look_up(key);
#pragma unroll 1
    for (; key >= first; key -= kKeys) {
      filling_.wait_until_empty();
#pragma unroll 1
      for (int turn = 0; turn < kTurns; turn += kLookedUp) {
        int now[kLookedUp];
#pragma unroll
        for (int j = 0; j < kLookedUp; ++j) now[j] = next[j];
        if (turn + kLookedUp < kTurns) {
          look_up(key + (turn + kLookedUp) * kTurnRows);
        } else if (key > first) {
          look_up(key - kKeys);
        }
#pragma unroll
        for (int j = 0; j < kLookedUp; ++j) {
          copy(tile, key + (turn + j) * kTurnRows, of_rows + (turn + j) * kTurnRows, now[j]);
        }
      }
      ptx::arrive_behind_copies(filling_.full());
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(filling_.full());
      filling_.advance();
    }
  }

  // Of a key's row the lane's chunk of each piece.
  __device__ __forceinline__ void copy(const Tile& tile, int key, int row, int page) {
    const int chunk = lane_ % kRowLanes;
    const uint32_t to = ptx::shared_address(filling_.buffer()[0][row]) + ((chunk ^ (row & 7)) << 4);
    const bool in_pages = key < tile.in_pages;
    const bool bad = in_pages && static_cast<uint32_t>(page) >= static_cast<uint32_t>(num_pages_);
    const bool exists = key < tile.k_len && !bad;
    // Any address will do where nothing is copied.
    const char* from = in_pages ? source_.of_page(tile, exists ? page : 0, key, sizeof(uint16_t))
                                : source_.of_row(tile, exists ? key : tile.in_pages);
    const int left = source_.dim() - chunk * 8;
    if (kOfKeys && bad && key < tile.k_len) {
      // Scores with the keys of a page that is not there are NaN: so is the result of whoever sees it.
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::store_16_bytes(to + piece * (kKeys * kRowBytes), make_uint4(~0u, ~0u, ~0u, ~0u));
      }
      return;
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const bool copied = exists && piece * kPieceDims < left;
      ptx::copy_async(to + piece * (kKeys * kRowBytes), from + (copied ? (piece * kRowLanes + chunk) * 16 : 0),
                      copied);
    }
  }

  const Source<kRole> source_;
  const int num_pages_;
  Plan& smem_;
  Filling<Shape, kRole> filling_;
  const int warp_, lane_;
};

}  // namespace pallas_attn::attention::sm90
