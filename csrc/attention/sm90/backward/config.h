// Tile sizes and thread roles of the backward kernel on Hopper, and the words for them:
//
//   key tile    kKeys neighbouring keys of a sequence; a CTA has one at a time, a math warpgroup half of it
//   query tile  kQueries neighbouring queries of one head, of those which see the key tile
//   part        64 of a query tile's queries, all of them or one of two halves
//   step        one query tile: a key tile's steps are those of all heads of its KV head
#pragma once

#include <cstdint>

#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90::backward {

using namespace pallas_attn::sm90;

// Of the last warpgroup, one warp each; two that add parts' gradients, by turns.
enum Feeder { kLoader = 0, kRowLoader = 1, kAdder = 2 };
constexpr int kAdders = 2;

// Columns of ones beside keys: a product with them sums what is multiplied with keys. The fewest there are.
constexpr int kCountColumns = 8;

// Heads of up to kDim elements, values of up to kValueDim: shorter ones are filled up with zeros on their way
// to shared memory.
template <int kDim_, int kValueDim_, int kParts_>
struct ShapeOf {
  static constexpr int kPasses = 1;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  // Narrow heads leave registers for two parts, which share what a step costs whatever its width.
  static constexpr int kParts = kParts_;
  static constexpr int kQueries = kParts * kFragmentRows;
  static constexpr int kMath = 2;  // math warpgroups
  static constexpr int kKeys = kMath * kFragmentRows;
  static constexpr int kPieces = (kDim + kPieceDims - 1) / kPieceDims;
  static constexpr int kValuePieces = (kValueDim + kPieceDims - 1) / kPieceDims;

  // Of a query tile's gradient each math warpgroup works out a part, or as many columns of the only one.
  // Where those are whole pieces of keys, the ones are the piece behind, and all keys are counted; else each
  // counts its own half of them.
  static constexpr bool kOwnPart = kParts == kMath;
  static constexpr int kOwnDims = kPieces * kPieceDims / (kOwnPart ? 1 : kMath);
  static constexpr bool kOnesBeside = kOwnDims == kPieceDims;
  static_assert((kOwnPart || kParts == 1) && (kOnesBeside || kOwnDims == 32));
  // A row of sums: a query's gradient, and numbers that add up to what was counted.
  static constexpr int kSumColumns = kDim + kCountColumns;
  static constexpr float kOne = kOnesBeside ? 1.0f / kCountColumns : 1.0f * kMath / kCountColumns;

  // Of keys: a second one where there is room for it, so that tiles follow each other at once.
  static constexpr int kKeyStages = kDim <= 64 ? 2 : 1;
  // A step's queries and gradients of out are asked for when those of the step before the last are done with.
  static constexpr int kQueryStages = 2, kOutStages = 2;
  // Of parts' gradients, which wait for the tiles before to add theirs; and barriers, of which an adder has
  // its own.
  static constexpr int kSums = kParts == 1 ? 2 : 3, kSumStages = kSums * kAdders;

  static constexpr int kConsumerThreads = kMath * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  // A thread's registers: those the CTA began with are dealt anew between the roles.
  static constexpr int kConsumerRegisters = 240, kFeederRegisters = 24;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kMath * kConsumerRegisters + kFeederRegisters <= (kMath + 1) * kLaunchRegisters);
};

using Shape64 = ShapeOf<64, 64, 2>;
using Shape96 = ShapeOf<96, 96, 1>;
using Shape128 = ShapeOf<128, 128, 1>;

}  // namespace pallas_attn::attention::sm90::backward
