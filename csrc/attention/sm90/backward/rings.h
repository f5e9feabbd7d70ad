// Where roles are in the rings that they fill and empty.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/walk.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90::backward {

constexpr int kToldTiles = 2;

// Where a role is in a ring of so many buffers, of which it has been through some.
template <int kStages>
struct Place {
  int count;

  __device__ __forceinline__ int stage() const { return static_cast<uint32_t>(count) % kStages; }
  // What to wait for before reading, and before overwriting.
  __device__ __forceinline__ uint32_t full() const { return static_cast<uint32_t>(count) / kStages & 1; }
  __device__ __forceinline__ uint32_t empty() const { return full() ^ 1; }
};

template <int kStages>
__device__ __forceinline__ void wait_until_full(Ring<kStages, 1, 1>& ring, int count) {
  const Place<kStages> at = {count};
  ptx::mbarrier_wait(&ring.full[at.stage()][0], at.full());
}
template <int kStages>
__device__ __forceinline__ void wait_until_empty(Ring<kStages, 1, 1>& ring, int count) {
  const Place<kStages> at = {count};
  ptx::mbarrier_wait(&ring.empty[at.stage()][0], at.empty());
}

// The loader's way through the tiles of a list: one lane finds what is told of each in its stage,
// and visits those that meet some other tile; those that do not are answered by the whole warp.
template <typename List, typename Plan, typename Find, typename Meets, typename Answer, typename Visit>
__device__ __forceinline__ void take_tiles(const List& list, Plan& smem, int lane, Find find, Meets meets,
                                           Answer answer, Visit visit) {
  for (int count = 0;;) {
    const Place<kToldTiles> place = {count};
    ptx::mbarrier_wait(&smem.told.empty[place.stage()][0], place.empty());
    Tile& tile = smem.tiles[place.stage()];
    // Not before there is room for it: tiles wait for those that others have taken before them.
    const int index = list.take(lane);
    if (lane == 0) find(index, tile, place.stage());
    __syncwarp();
    const bool more = tile.head >= 0;
    const bool skips = more && !meets(tile, place.stage());
    if (skips) answer(tile);
    __syncwarp();  // lane 0 may write the next tile over it
    if (skips) continue;
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.full[place.stage()][0]);
    if (!more) break;
    if (lane == 0) visit(tile, count);
    __syncwarp();
    ++count;
  }
}

// One role's way through the tiles that it is told of: visit(tile) for each. For a whole warp.
template <typename Plan, typename Visit>
__device__ __forceinline__ void each_tile(Plan& smem, int lane, Visit visit) {
  for (int count = 0;; ++count) {
    const Place<kToldTiles> place = {count};
    ptx::mbarrier_wait(&smem.told.full[place.stage()][0], place.full());
    const Tile& tile = smem.tiles[place.stage()];
    if (tile.head < 0) return;
    visit(tile);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.empty[place.stage()][0]);
  }
}

}  // namespace pallas_attn::attention::sm90::backward
