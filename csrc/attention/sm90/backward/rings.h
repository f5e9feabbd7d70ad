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
