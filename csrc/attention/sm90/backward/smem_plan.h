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

}  // namespace pallas_attn::attention::sm90::backward
