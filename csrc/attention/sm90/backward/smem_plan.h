// Shared memory of the backward kernel.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/config.h"
#include "attention/sm90/backward/rings.h"
#include "attention/sm90/backward/rows.h"
#include "attention/sm90/backward/walk.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
struct alignas(1024) SmemPlan {
  using KeyPiece = SwizzledPiece<Shape::kKeys>;
  using QueryPiece = SwizzledPiece<Shape::kQueries>;

  KeyPiece sK[Shape::kKeyStages][Shape::kPieces];
  KeyPiece sV[Shape::kValuePieces];
  QueryPiece sQ[Shape::kQueryStages][Shape::kPieces];
  QueryPiece sdO[Shape::kOutStages][Shape::kValuePieces];
  // Gradients of scores, of a part: queries by keys of a math warpgroup.
  SwizzledPiece<kFragmentRows> sdS[Shape::kParts][Shape::kMath];
  SwizzledPiece<kStepDims> ones;  // behind the keys, as wgmma's offsets are positive
  alignas(16) float sums[Shape::kSums][kFragmentRows][Shape::kSumColumns];  // parts' gradients of queries

  Rows<Shape::kQueries> rows[Shape::kOutStages];

  Tile tiles[kToldTiles];
  Ring<kToldTiles, 1, 1> told;
  Ring<Shape::kKeyStages, 1, 1> keys;
  Ring<1, 1, 1> values;
  Ring<Shape::kQueryStages, 1, 1> queries;
  Ring<Shape::kOutStages, 1, 1> outs;   // and `rows`
  Ring<1, 1, 1> scores;                 // their gradients, by both math warpgroups
  Ring<Shape::kSumStages, 1, 1> added;  // `sums`

  __device__ void init() {
    constexpr int kOfPart = Shape::kConsumerWarps / Shape::kParts;  // those who work out its gradient
    told.init(Shape::kConsumerWarps + 1 + kAdders, 1, 1);
    keys.init(Shape::kConsumerWarps, 1, 1);
    values.init(Shape::kConsumerWarps, 1, 1);
    queries.init(Shape::kConsumerWarps, 1, 1);
    outs.init(Shape::kConsumerWarps, 1 + 32, 1 + 32);
    scores.init(Shape::kConsumerWarps, Shape::kConsumerWarps, Shape::kConsumerWarps);
    added.init(1, kOfPart, kOfPart);
  }
};

}  // namespace pallas_attn::attention::sm90::backward
