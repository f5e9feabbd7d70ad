// Heads too wide for one pass, in which gradients of 128 keys and of their values take 128 x 256 registers
// each: three passes instead, of one gradient each, and one kernel that is all three. Heads of any width take
// them where lists name the blocks that meet: no pass waits for another tile, so there is no order to keep.
//
//   held tile  128 neighbouring tokens of a head, keys or queries; a math warpgroup has 64 of them, and their
//              gradients are its accumulators
//   met tile   64 tokens of the other side that see it, or are seen; one step
//
// On either side a token has a row of head_dim elements, its query or key (`qk`), and one of value_dim, its
// gradient of out or value (`vo`). Scores are held qk by met qk, gradients of weights held vo by met vo; and
// what comes of them meets met rows, from registers.
#pragma once

#include <type_traits>

#include "attention/sm90/backward/tile_list.h"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90::backward::wide {

using namespace pallas_attn::sm90;

// What names the tiles that a tile meets: a band of them, lists of blocks, or a layout's rows.
enum class Meets { kBand, kListed, kRows };

template <int kDim_, int kValueDim_, Meets kMeets_ = Meets::kBand>
struct ShapeOf {
  static constexpr int kPasses = 3;
  static constexpr Meets kMeets = kMeets_;
  static constexpr bool kListed = kMeets != Meets::kBand;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_;
  // Of a thread. Who walks lists has use for more, where gradients leave some.
  static constexpr int kFeederRegisters = kListed && kDim <= 128 ? 56 : 24;
  static constexpr int kConsumerRegisters = (3 * 168 - kFeederRegisters) / 2;
  static constexpr int kPieces = kDim / kPieceDims, kValuePieces = kValueDim / kPieceDims;
  static_assert(kDim % kPieceDims == 0 && kValueDim % kPieceDims == 0);
};

using Shape192x128 = ShapeOf<192, 128>;
using Shape256 = ShapeOf<256, 256>;
using Listed64 = ShapeOf<64, 64, Meets::kListed>;
using Listed128 = ShapeOf<128, 128, Meets::kListed>;
using Listed256 = ShapeOf<256, 256, Meets::kListed>;
using Rows64 = ShapeOf<64, 64, Meets::kRows>;
using Rows128 = ShapeOf<128, 128, Meets::kRows>;
using Rows256 = ShapeOf<256, 256, Meets::kRows>;

constexpr int kMath = 2;  // math warpgroups
constexpr int kHeld = kMath * kFragmentRows, kMet = 64, kMetShift = 6;
static_assert(1 << kMetShift == kMet);
constexpr int kConsumerThreads = kMath * kWarpgroupThreads, kConsumerWarps = kConsumerThreads / 32;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;

// Of the last warpgroup.
enum Feeder { kLoader = 0, kRowLoader = 1, kFeeders = 2 };

// Whose gradient a pass works out.
enum class Gradient { kKeys, kQueries, kValues };

template <typename Shape, Gradient kGradient>
struct PassOf {
  using Dims = Shape;
  static constexpr Gradient kOf = kGradient;
  static constexpr Meets kMeets = Shape::kMeets;
  static constexpr bool kListed = Shape::kListed, kOfLayout = kMeets == Meets::kRows;
  static constexpr Side kSide = kOf == Gradient::kQueries ? Side::kQueries : Side::kKeys;
  static constexpr bool kHoldsQueries = kSide == Side::kQueries;
  // Gradients of values are products of weights alone.
  static constexpr bool kDifferentiates = kOf != Gradient::kValues;
  static constexpr int kOut = kOf == Gradient::kValues ? Shape::kValueDim : Shape::kDim;
  // A step's qk is met twice where scores have gradients, with another step between; else its vo is.
  static constexpr int kQkStages = 2, kVoStages = kDifferentiates ? 1 : 2;
};

// visit(Pass{}) for each, in the order in which they run: those that take longest first.
template <typename Shape, typename Visit>
void each_pass(Visit visit) {
  visit(PassOf<Shape, Gradient::kKeys>{});
  visit(PassOf<Shape, Gradient::kQueries>{});
  visit(PassOf<Shape, Gradient::kValues>{});
}

}  // namespace pallas_attn::attention::sm90::backward::wide
