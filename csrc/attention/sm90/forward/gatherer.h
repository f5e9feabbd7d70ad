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

  __device__ Gatherer(const ForwardParams& params, Plan& smem, int warp, int lane)
      : source_(params), smem_(smem), filling_(smem), warp_(warp), lane_(lane) {}

  __device__ void load(const Tile& tile) {
    const Places places(source_, tile, sizeof(uint16_t), 0, 0);
    HeldPlaces<kRole, kRows> held(lane_);
    const int first = tile.first_key * kKeys + warp_ * kRows;  // of the warp's
    int key = first + (tile.num_keys - 1) * kKeys;
    held.look_up(places, key);
#pragma unroll 1
    for (; key >= first; key -= kKeys) {
      const uint32_t bad = held.settle(places, key);
      held.look_up(places, key - kKeys);
      filling_.wait_until_empty();
      copy(held);
      if (kOfKeys && __any_sync(0xffffffff, bad != 0)) {
        ptx::wait_for_copies();
        __syncwarp();
        fill_rows(filling_.buffer(), warp_ * kRows, bad, lane_, ~0u);
      }
      ptx::arrive_behind_copies(filling_.full());
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(filling_.full());
      filling_.advance();
    }
  }

 private:
  static constexpr int kRowLanes = kRowBytes / 16, kRowsAtOnce = 32 / kRowLanes;
  static constexpr int kRows = kKeys / kHandWarps, kTurns = kRows / kRowsAtOnce;
  static_assert(kKeys % kHandWarps == 0 && kRows % kRowsAtOnce == 0);
  static constexpr int kBlockTurns = 32 / kRowsAtOnce;
  static constexpr int kAtOnce = 4;  // turns whose places are asked for before the first is copied
  static_assert(kTurns % kAtOnce == 0);

  // Of the warp's rows the lane's chunk of each piece.
  __device__ __forceinline__ void copy(const HeldPlaces<kRole, kRows>& held) {
    const int chunk = lane_ % kRowLanes, left = source_.dim() - chunk * 8;
    // Rows of turns are 4 apart: a row's number modulo 8 swizzles its chunks in one of two ways.
    const int first_row = warp_ * kRows + lane_ / kRowLanes;
    const uint32_t base = ptx::shared_address(filling_.buffer().row_of(0, first_row));
#pragma unroll
    for (int block = 0; block < HeldPlaces<kRole, kRows>::kHeld; ++block) {
#pragma unroll 1
      for (int turn = block * kBlockTurns; turn < min((block + 1) * kBlockTurns, kTurns); turn += kAtOnce) {
        const char* from[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          from[j] = held.of((turn + j) * kRowsAtOnce + lane_ / kRowLanes, block);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int row = (turn + j) * kRowsAtOnce;
          const uint32_t to = base + row * kRowBytes + ((chunk ^ ((first_row + row) & 7)) << 4);
#pragma unroll
          for (int piece = 0; piece < kPieces; ++piece) {
            const bool copied = from[j] != nullptr && piece * kPieceDims < left;
            ptx::copy_async(to + piece * Filling<Shape, kRole>::Buffer::kPieceStride,
                            from[j] + chunk * 16 + piece * kRowBytes, copied);
          }
        }
      }
    }
  }

  const Source<kRole> source_;
  Plan& smem_;
  Filling<Shape, kRole> filling_;
  const int warp_, lane_;
};

}  // namespace pallas_attn::attention::sm90
