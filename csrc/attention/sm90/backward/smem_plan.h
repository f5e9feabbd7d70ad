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

  KeyPiece sK[kStages][Shape::kPieces];
  KeyPiece sV[kStages][Shape::kValuePieces];
  QueryPiece sQ[kStages][Shape::kPieces];
  QueryPiece sdO[kStages][Shape::kValuePieces];
  QueryPiece sdS[Shape::kMath];  // gradients of scores: queries by the keys of a math warpgroup
  SwizzledPiece<8> ones;

  alignas(16) Rows<Shape::kQueries> rows[kStages];
  alignas(16) float mean[kStages][Shape::kPieces * kPieceDims];  // of some keys
  float counts[Shape::kMath][kFragmentRows];
  Turn turn;

  Tile tiles[kStages];
  Ring<kStages, 1, 1> told;
  Ring<kStages, 1, 1> keys;       // and values
  Ring<kStages, 1, 1> queries;  // and numbers of rows
  Ring<kStages, 1, 1> outs;
  Ring<1, 1, 1> turns;  // full: it is this step's turn; empty: its gradient has been added

  // Who fills it: the copy engine is one, the lanes that load rows are 32 more.
  __device__ void init() {
    told.init(Shape::kConsumerWarps + 2, 1, 1);
    keys.init(Shape::kConsumerWarps, 1, 1);
    queries.init(Shape::kConsumerWarps, 33, 33);
    outs.init(Shape::kConsumerWarps, 1, 1);
    turns.init(Shape::kConsumerWarps, 1, 1);
  }
};

// Where a role is in rings: how many buffers it has been through.
struct Place {
  int count = 0;

  __device__ __forceinline__ int stage() const { return count % kStages; }
  // What to wait for before reading, and before overwriting.
  __device__ __forceinline__ uint32_t full() const { return count / kStages & 1; }
  __device__ __forceinline__ uint32_t empty() const { return full() ^ 1; }
};

// One role's way through the tiles that it is told of: visit(tile, place) for each. For a whole warp.
template <typename Plan, typename Visit>
__device__ __forceinline__ void each_tile(Plan& smem, int lane, Visit visit) {
  for (Place tiles;; ++tiles.count) {
    ptx::mbarrier_wait(&smem.told.full[tiles.stage()][0], tiles.full());
    const Tile& tile = smem.tiles[tiles.stage()];
    if (tile.kv_head < 0) return;
    visit(tile, tiles);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.empty[tiles.stage()][0]);
  }
}

}  // namespace pallas_attn::attention::sm90::backward
