// Shared memory of the backward kernel.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/config.h"
#include "attention/sm90/backward/walk.h"
#include "sm90/ring.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::attention::sm90::backward {

// Numbers of a tile's queries, in the order of fragments [keys, queries]: a thread, which has two of every
// eight columns, loads 16 bytes at a time.
template <int kQueries>
struct alignas(16) Rows {
  float lse[kQueries / 2][4];    // of columns c and c + 1: maximum, maximum, rest, rest
  float delta[kQueries / 4][4];  // of columns c, c + 1, c + 8 and c + 9

  __device__ static int lse_word(int column) { return column / 2 * 4 + column % 2; }
  __device__ static int delta_word(int column) {
    return (column / 16 * 4 + column % 8 / 2) * 4 + column / 8 % 2 * 2 + column % 2;
  }
};

template <typename Shape>
struct alignas(1024) SmemPlan {
  using KeyPiece = SwizzledPiece<Shape::kKeys>;
  using QueryPiece = SwizzledPiece<Shape::kQueries>;

  KeyPiece sK[Shape::kKeyStages][Shape::kPieces];
  KeyPiece sV[Shape::kKeyStages][Shape::kValuePieces];
  QueryPiece sQ[kQueryStages][Shape::kPieces];
  QueryPiece sdO[kOutStages][Shape::kValuePieces];
  QueryPiece sdS[kScoreStages][Shape::kMath];  // gradients of scores: queries by keys of a math warpgroup
  SwizzledPiece<kStepDims> ones;               // behind the keys, as wgmma's offsets are positive
  alignas(16) float sums[Shape::kQueries][Shape::kSumColumns];  // a step's gradient of queries

  Rows<Shape::kQueries> rows[kRowStages];

  Tile tiles[kToldTiles];
  Ring<kToldTiles, 1, 1> told;
  Ring<Shape::kKeyStages, 1, 1> keys, values;
  Ring<kQueryStages, 1, 1> queries;
  Ring<kOutStages, 1, 1> outs;
  Ring<kRowStages, 1, 1> numbers;   // of rows
  Ring<kScoreStages, 1, 1> scores;  // their gradients, by both math warpgroups
  Ring<kAdders, 1, 1> added;        // `sums`, one buffer for all of its adders

  __device__ void init() {
    told.init(Shape::kConsumerWarps + 1 + kAdders, 1, 1);
    keys.init(Shape::kConsumerWarps, 1, 1);
    values.init(Shape::kConsumerWarps, 1, 1);
    queries.init(Shape::kConsumerWarps, 1, 1);
    outs.init(Shape::kConsumerWarps, 1, 1);
    numbers.init(Shape::kConsumerWarps, 32, 32);
    scores.init(Shape::kConsumerWarps, Shape::kConsumerWarps, Shape::kConsumerWarps);
    added.init(1, Shape::kConsumerWarps, Shape::kConsumerWarps);
  }
};

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
    if (tile.kv_head < 0) return;
    visit(tile);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.empty[place.stage()][0]);
  }
}

}  // namespace pallas_attn::attention::sm90::backward
