// Shared memory of a pass.
#pragma once

#include "attention/sm90/backward/rings.h"
#include "attention/sm90/backward/rows.h"
#include "attention/sm90/backward/wide/config.h"

namespace pallas_attn::attention::sm90::backward::wide {

// Numbers of held queries, and what is taken back of their gradients.
template <int kDim>
struct alignas(16) HeldRows {
  float maximum[kHeld], rest[kHeld], delta[kHeld];
  float mean[kDim];  // of some keys
};

template <typename Pass>
struct alignas(1024) SmemPlan {
  using Dims = typename Pass::Dims;
  using Rows = std::conditional_t<Pass::kHoldsQueries, HeldRows<Dims::kDim>, backward::Rows<kMet>>;
  // A held tile's are loaded with it, a step's ahead.
  static constexpr int kRowStages = Pass::kHoldsQueries ? 1 : 2;

  SwizzledPiece<kHeld> held_qk[Dims::kPieces];
  SwizzledPiece<Pass::kDifferentiates ? kHeld : 8> held_vo[Pass::kDifferentiates ? Dims::kValuePieces : 1];
  SwizzledPiece<kMet> met_qk[Pass::kQkStages][Dims::kPieces];
  SwizzledPiece<kMet> met_vo[Pass::kVoStages][Dims::kValuePieces];

  Rows rows[kRowStages];

  Tile tiles[kToldTiles];
  Ring<kToldTiles, 1, 1> told;
  Ring<1, 1, 1> qk_held, vo_held;
  Ring<Pass::kQkStages, 1, 1> qk_met;
  Ring<Pass::kVoStages, 1, 1> vo_met;
  Ring<kRowStages, 1, 1> numbers;

  // Of lists: a tile's steps, and which pairs of a step count.
  int steps[kToldTiles], seen[Pass::kQkStages];

  __device__ void init() {
    told.init(kConsumerWarps + kFeeders - 1, 1, 1);
    qk_held.init(kConsumerWarps, 1, 1);
    vo_held.init(kConsumerWarps, 1, 1);
    qk_met.init(kConsumerWarps, 1, 1);
    vo_met.init(kConsumerWarps, 1, 1);
    numbers.init(kConsumerWarps, 32, 32);
  }
};

}  // namespace pallas_attn::attention::sm90::backward::wide
