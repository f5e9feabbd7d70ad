// Shared memory of the backward kernel.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/config.h"
#include "attention/sm90/backward/walk.h"
#include "sm90/ring.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::attention::sm90::backward {

// A number for each query of a tile.
template <int kQueries>
struct Rows {
  float maximum[kQueries], rest[kQueries], delta[kQueries];
};

// Where a step's gradient of queries is added, and whether it is the first there, or the last.
struct Turn {
  int head, query;
  int first, last;
};

template <typename Shape>
struct alignas(1024) SmemPlan {
  using KeyPiece = SwizzledPiece<Shape::kKeys>;
  using QueryPiece = SwizzledPiece<Shape::kQueries>;

  KeyPiece sK[kKeyStages][Shape::kPieces];
  KeyPiece sV[Shape::kValuePieces];
  QueryPiece sQ[kQueryStages][Shape::kPieces];
  QueryPiece sdO[kOutStages][Shape::kValuePieces];
  QueryPiece sdS[Shape::kMath];  // gradients of scores: queries by the keys of a math warpgroup
  SwizzledPiece<8> ones;

  alignas(16) Rows<Shape::kQueries> rows[kQueryStages];
  alignas(16) float mean[kKeyStages][Shape::kPieces * kPieceDims];  // of some keys
  float counts[Shape::kMath][kFragmentRows];
  Turn turn[kTurnStages];

  Tile tiles[kToldTiles];
  Ring<kToldTiles, 1, 1> told;
  Ring<kKeyStages, 1, 1> keys;
  Ring<1, 1, 1> values;
  Ring<kQueryStages, 1, 1> queries;  // and numbers of rows
  Ring<kOutStages, 1, 1> outs;
  Ring<kTurnStages, 1, 1> turns;  // full: it is a step's turn; empty: its gradient has been added
  Ring<kTurnStages, 1, 1> added;  // full: that has been noticed

  // Who fills it: the copy engine is one, the lanes that load rows are 32 more.
  __device__ void init() {
    told.init(Shape::kConsumerWarps + 3, 1, 1);
    keys.init(Shape::kConsumerWarps, 1, 1);
    values.init(Shape::kConsumerWarps, 1, 1);
    queries.init(Shape::kConsumerWarps, 33, 33);
    outs.init(Shape::kConsumerWarps, 1, 1);
    turns.init(Shape::kConsumerWarps, 1, 1);
    added.init(1, 1, 1);
  }
};

// Where a role is in a ring of so many buffers, of which it has been through some.
template <int kStages>
struct Place {
  int count;

  __device__ __forceinline__ int stage() const { return count % kStages; }
  // What to wait for before reading, and before overwriting.
  __device__ __forceinline__ uint32_t full() const { return count / kStages & 1; }
  __device__ __forceinline__ uint32_t empty() const { return full() ^ 1; }
};

// One role's way through the tiles that it is told of: visit(tile, count) for each. For a whole warp.
template <typename Plan, typename Visit>
__device__ __forceinline__ void each_tile(Plan& smem, int lane, Visit visit) {
  for (int count = 0;; ++count) {
    const Place<kToldTiles> place = {count};
    ptx::mbarrier_wait(&smem.told.full[place.stage()][0], place.full());
    const Tile& tile = smem.tiles[place.stage()];
    if (tile.kv_head < 0) return;
    visit(tile, count);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.empty[place.stage()][0]);
  }
}

}  // namespace pallas_attn::attention::sm90::backward
