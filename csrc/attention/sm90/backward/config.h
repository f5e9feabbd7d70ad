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

// Heads of up to kDim elements, values of up to kValueDim: shorter ones are filled up with zeros on their way
// to shared memory.
template <int kDim_, int kValueDim_, int kQueries_>
struct ShapeOf {
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  static constexpr int kQueries = kQueries_;
  static constexpr int kMath = 2;  // math warpgroups
  static constexpr int kKeys = kMath * kFragmentRows;
  static constexpr int kPieces = (kDim + kPieceDims - 1) / kPieceDims;
  static constexpr int kValuePieces = (kValueDim + kPieceDims - 1) / kPieceDims;

  // Each math warpgroup works out as many columns of a query tile's gradient.
  static constexpr int kOwnDims = kDim / kMath;
  static_assert(kQueries == kFragmentRows && kOwnDims % 32 == 0);

  static constexpr int kConsumerThreads = kMath * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  // A thread's registers: those the CTA began with are dealt anew between the roles.
  static constexpr int kConsumerRegisters = 240, kFeederRegisters = 24;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kMath * kConsumerRegisters + kFeederRegisters <= (kMath + 1) * kLaunchRegisters);
};

using Shape64 = ShapeOf<64, 64, 64>;
using Shape128 = ShapeOf<128, 128, 64>;

// Of the last warpgroup, one warp each.
enum Feeder { kLoader = 0, kRowLoader = 1, kOrder = 2, kRelease = 3 };

// Buffers. Values are done with when a tile's last step begins, keys when it ends. The next step's queries
// are asked for in the middle of a step and stay to the end of their own: with two buffers there would be
// half a step to fetch them.
constexpr int kKeyStages = 2, kQueryStages = 4, kOutStages = 2, kTurnStages = 2;
constexpr int kToldTiles = 2;

// Keys of a tile whose mean stands for what all have in common.
constexpr int kSample = 16;

}  // namespace pallas_attn::attention::sm90::backward
