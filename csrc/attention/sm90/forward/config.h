// Tile sizes and thread roles of the forward kernel on Hopper, and the words for them:
//
//   tile       queries of one sequence, each with all heads of one KV head: kRows rows, token by token
//   fragment   64 of its rows, those of one math warpgroup
//   key tile   kKeys neighbouring keys of a sequence, or their values
//   piece      any number of rows x 64 columns: what one copy writes
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90 {

using namespace pallas_attn::sm90;

enum class Role { kKeys, kValues };

constexpr int kManyThreads = 512;  // with which each begins with 128 registers

// Who brings keys and values to shared memory: the copy engine, a piece at a time; or all pieces of a page's
// tokens at once; threads, where pages are too short for its boxes; threads that convert them, a cache of
// bytes; or the copy engine, blocks that a list names.
enum class Feed { kEngine, kWoven, kGathered, kConverted, kListed };
constexpr int kHandWarps = 2;  // of threads that do so, for keys, and as many for values

constexpr int kConverters = 3;  // warps that convert keys of a cache of bytes, and as many for values

// Heads of up to kDim elements, values of up to kValueDim: shorter ones are filled up with zeros on their way
// to shared memory.
template <int kDim_, int kValueDim_, int kKeys_, int kMath_, int kQueryStages_, int kKeyStages_,
          int kValueStages_, Feed kFeed_ = Feed::kEngine>
struct ShapeOf {
  static constexpr Feed kFeed = kFeed_;
  static constexpr bool kListed = kFeed == Feed::kListed;
  static constexpr bool kWoven = kFeed == Feed::kWoven;
  static constexpr bool kConverted = kFeed == Feed::kConverted;
  static constexpr bool kByHand = kFeed == Feed::kGathered || kConverted;
  static constexpr int kDim = kDim_, kValueDim = kValueDim_, kKeys = kKeys_;
  static constexpr int kMath = kMath_;  // math warpgroups
  static constexpr int kRows = kMath * kFragmentRows;
  static constexpr int kQueryStages = kQueryStages_, kKeyStages = kKeyStages_, kValueStages = kValueStages_;
  static constexpr int kPieces = (kDim + kPieceDims - 1) / kPieceDims;
  static constexpr int kValuePieces = (kValueDim + kPieceDims - 1) / kPieceDims;

  // Key tiles of which bytes are there as they come, or on their way: keys of two, and values of so many.
  static constexpr int kRawValueStages = kPieces > kValuePieces ? 1 : 2;

  static constexpr int kConsumerThreads = kMath * kWarpgroupThreads;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  // One that scouts and has the copy engine load; beside it one of threads that load.
  static constexpr int kFeeders = kByHand ? 2 : 1;
  static constexpr int kThreads = kConsumerThreads + kFeeders * kWarpgroupThreads;
  // A thread's registers: those of the whole CTA are dealt anew between the roles.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kEngineRegisters = kValueDim > 192 || kMath > 2 ? 56 : 72;
  static constexpr int kFeederRegisters = kFeed == Feed::kGathered ? 32 : kEngineRegisters;
  static constexpr int kHandRegisters = !kByHand ? 0 : kConverted ? kFeederRegisters : 48;
  static constexpr int kConsumerRegisters =
      ((kMath + kFeeders) * kLaunchRegisters - kFeederRegisters - kHandRegisters) / kMath / 8 * 8;

  // The same for keys in pages, where heads of these sizes are several whole pieces.
  static constexpr bool kWeaves = kPieces > 1 && kDim % kPieceDims == 0 && kValueDim % kPieceDims == 0;
  using Woven = ShapeOf<kDim, kValueDim, kKeys, kMath, kQueryStages, kKeyStages, kValueStages, Feed::kWoven>;
  // For keys in short pages, and for a cache of bytes.
  using Gathered =
      ShapeOf<kDim, kValueDim, kKeys, kMath, kQueryStages, kKeyStages, kValueStages, Feed::kGathered>;
  // Math warpgroups leave registers to those that convert, and memory to bytes.
  using Converted = ShapeOf<kDim, kValueDim, kValueDim <= 128 ? 96 : 48, kMath, kQueryStages,
                            kDim == 64 ? kKeyStages : 2, kValueStages, Feed::kConverted>;
  using Listed =
      ShapeOf<kDim, kValueDim, kKeys, kMath, kQueryStages, kKeyStages, kValueStages, Feed::kListed>;
};

// What was tried beside these is on the kernel's page. At heads of 64 exponentials take as long as products:
// with a third math warpgroup there is always one that has products to issue. Threads that load leave no
// registers for it, and blocks that a list names are of 64 keys and more.
struct Shape64 : ShapeOf<64, 64, 96, 3, 2, 4, 4> {
  using OfTwo = ShapeOf<64, 64, 128, 2, 2, 4, 4>;
  using Gathered = OfTwo::Gathered;
  using Converted = OfTwo::Converted;
  using Listed = OfTwo::Listed;
};
using Shape96 = ShapeOf<96, 96, 128, 2, 2, 3, 2>;
using Shape128 = ShapeOf<128, 128, 128, 2, 2, 3, 2>;
using Shape192x128 = ShapeOf<192, 128, 128, 2, 1, 2, 2>;
using Shape192 = ShapeOf<192, 192, 96, 2, 1, 2, 2>;
using Shape256 = ShapeOf<256, 256, 64, 2, 1, 2, 2>;

// Query heads of a KV head, and which of a tile's queries a row is of: a division by multiplication, exact
// for the rows of a tile.
struct Group {
  int size;
  uint32_t inverse;

  __device__ explicit Group(int heads) : size(heads), inverse(65536 / heads + 1) {}
  __device__ __forceinline__ int query_of(int row) const { return static_cast<int>(row * inverse >> 16); }
};

// Three kernels of each shape. What few calls ask for costs registers, so the usual one lacks it: documents
// that do not lie in one piece, and what gradients need, which is the log-sum-exp in parts and out's lower
// bits; or rows whose heads have scales of their own, since they were made of a cache of bytes.
enum class Form { kUsual, kFull, kScaled };

// Of the warps that feed, one each; beside a cache of bytes, all from kFirstConverter on.
enum Feeder { kScout = 0, kKeyLoader = 1, kValueLoader = 2, kRawLoader = 1, kFirstConverter = 2 };
constexpr int kLoaders = 2;

// Tiles that are told of at a time: the one whose result is being stored, the one at work, and the next one.
constexpr int kToldTiles = 3;
PALLAS_ATTN_HOST_DEVICE constexpr int next_told(int told) { return told + 1 == kToldTiles ? 0 : told + 1; }

// The feeding side's copies are of 16 bytes where pages are shorter than boxes of so many rows: the copy
// engine takes 1.4 times as long for boxes of eight, which the swizzle would allow. Of several pieces a row,
// it takes no longer than threads.
constexpr int kLeastBoxRows = 16, kLeastWovenRows = 8, kLeastRawRows = 8;

}  // namespace pallas_attn::attention::sm90
