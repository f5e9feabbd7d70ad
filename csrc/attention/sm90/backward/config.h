// Tile sizes and thread roles of the backward kernel on Hopper, and the words for them:
//
//   key tile    kKeys neighbouring keys of a sequence; a CTA has one at a time, a math warpgroup half of it
//   query tile  kQueries neighbouring queries of one head, of those which see the key tile
//   step        one query tile: a key tile's steps are those of all heads of its KV head
#pragma once

#include <cstdint>

#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90::backward {

using namespace pallas_attn::sm90;

// Columns of ones beside keys: a product with them sums what is multiplied with keys. The fewest there are.
constexpr int kCountColumns = 8;

// Heads of up to kDim elements, values of up to kValueDim: shorter ones are filled up with zeros on their way
// to shared memory.
template <int kDim_, int kValueDim_, int kQueries_>
struct ShapeOf {
  static constexpr int kPasses = 1;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kMath = 2;  // math warpgroups
  static constexpr int kKeys = kMath * kFragmentRows;
  static constexpr int kPieces = (kDim + kPieceDims - 1) / kPieceDims;
  static constexpr int kValuePieces = (kValueDim + kPieceDims - 1) / kPieceDims;

  // Each math warpgroup works out as many columns of a query tile's gradient. Where they are whole pieces of
  // keys, the ones are the piece behind, and both count all keys; else each counts its own half of them.
  static constexpr int kOwnDims = kPieces * kPieceDims / kMath;
  static constexpr bool kOnesBeside = kOwnDims == kPieceDims;
  static_assert(kQueries == kFragmentRows && (kOnesBeside || kOwnDims == 32));
  // A row of sums: a query's gradient, and numbers that add up to what was counted.
  static constexpr int kSumColumns = kDim + kCountColumns;
  static constexpr float kOne = kOnesBeside ? 1.0f / kCountColumns : 1.0f * kMath / kCountColumns;

  // Of keys and values: a second one where there is room for it, so that tiles follow each other at once.
  static constexpr int kKeyStages = kDim <= 64 ? 2 : 1;

  static constexpr int kConsumerThreads = kMath * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  // A thread's registers: those the CTA began with are dealt anew between the roles.
  static constexpr int kConsumerRegisters = 240, kFeederRegisters = 24;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kMath * kConsumerRegisters + kFeederRegisters <= (kMath + 1) * kLaunchRegisters);
};

using Shape64 = ShapeOf<64, 64, 64>;
using Shape96 = ShapeOf<96, 96, 64>;
using Shape128 = ShapeOf<128, 128, 64>;

// Of the last warpgroup, one warp each; two that add, by turns.
enum Feeder { kLoader = 0, kRowLoader = 1, kAdder = 2 };
constexpr int kAdders = 2;

// Buffers. A step's queries are asked for in the middle of the step before and stay to its end, its gradients
// of out from there to the middle.
constexpr int kQueryStages = 3, kOutStages = 2, kRowStages = 3, kScoreStages = 2;

}  // namespace pallas_attn::attention::sm90::backward
