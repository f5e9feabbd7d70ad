// Warps that have the keys of one tile after the other copied by their threads, or the values, 16 bytes each:
// where pages are too short for the copy engine.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/filling.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/sources.h"
#include "ptx/async_copy.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::attention::sm90 {

// One of kHandWarps. Eight lanes copy a row of all pieces, and a warp four rows at a time, as do its
// neighbours.
template <typename Shape, Role kRole>
class Gatherer {
 public:
  using Plan = SmemPlan<Shape>;
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kPieces = kOfKeys ? Shape::kPieces : Shape::kValuePieces;
  static constexpr int kKeys = Shape::kKeys;

  // Who arrives when a buffer is full: every lane behind its copies, and lane 0 for what lanes stored.
  static constexpr int kWriters = 33 * kHandWarps;

  __device__ Gatherer(const ForwardParams& params, const Maps&, Plan& smem, int warp, int lane)
      : source_(params),
        num_pages_(params.num_pages),
        smem_(smem),
        filling_(smem),
        of_rows_(warp * kRowsAtOnce + lane / kRowLanes),
        chunk_(lane % kRowLanes),
        lane_(lane) {}

  __device__ void load(const Tile& tile) {
    const Places places(source_, tile, sizeof(uint16_t), chunk_ * 16, chunk_ * 16);
    const int first = tile.first_key * kKeys + of_rows_;  // of the lane's
    int key = first + (tile.num_keys - 1) * kKeys;
    int pages[kLookedUp];
#pragma unroll
    for (int j = 0; j < kLookedUp; ++j) pages[j] = places.entry_of(key + j * kTurnRows);
#pragma unroll 1
    for (; key >= first; key -= kKeys) {
      filling_.wait_until_empty();
#pragma unroll 1
      for (int turn = 0; turn < kTurns; turn += kLookedUp) {
        const int ahead = turn + kLookedUp < kTurns ? key + (turn + kLookedUp) * kTurnRows : key - kKeys;
#pragma unroll
        for (int j = 0; j < kLookedUp; ++j) {
          copy(places, key + (turn + j) * kTurnRows, of_rows_ + (turn + j) * kTurnRows, pages[j]);
          pages[j] = places.entry_of(ahead + j * kTurnRows);
        }
      }
      ptx::arrive_behind_copies(filling_.full());
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(filling_.full());
      filling_.advance();
    }
  }

 private:
  static constexpr int kRowLanes = kRowBytes / 16, kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kTurnRows = kRowsAtOnce * kHandWarps, kTurns = kKeys / kTurnRows;
  static_assert(kKeys % kTurnRows == 0);
  // Table entries that are looked up at a time, ahead of the copies that need them.
  static constexpr int kLookedUp = 4;
  static_assert(kTurns % kLookedUp == 0);

  // Of a key's row the lane's chunk of each piece.
  __device__ __forceinline__ void copy(const Places<kRole>& places, int key, int row, int page) {
    const uint32_t to = ptx::shared_address(filling_.buffer()[0][row]) + ((chunk_ ^ (row & 7)) << 4);
    const bool bad = places.leads_nowhere(key, page);
    if (kOfKeys && bad) {
      // Scores with the keys of a page that is not there are NaN: so is the result of whoever sees it.
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::store_16_bytes(to + piece * (kKeys * kRowBytes), make_uint4(~0u, ~0u, ~0u, ~0u));
      }
      return;
    }
    const bool exists = places.holds(key) && !bad;
    // Any address will do where nothing is copied.
    const char* from = exists ? places.address(key, page) : places.anywhere();
    const int left = source_.dim() - chunk_ * 8;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const bool copied = exists && piece * kPieceDims < left;
      ptx::copy_async(to + piece * (kKeys * kRowBytes), from + (copied ? piece * kRowBytes : 0), copied);
    }
  }

  const Source<kRole> source_;
  const int num_pages_;
  Plan& smem_;
  Filling<Shape, kRole> filling_;
  const int of_rows_, chunk_, lane_;
};

}  // namespace pallas_attn::attention::sm90
