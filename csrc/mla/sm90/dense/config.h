// Tile sizes and thread roles of the dense Hopper kernel, and the words for them:
//
//   row tile      64 of the query rows that share a KV head: what a CTA works on
//   run           neighbouring pages of one request, worked on one after the other (run_walker.h)
//   even, odd     a page by its place in the run; the buffer it is loaded into; the warpgroup that owns it
//   low, high     columns 0-255 and 256-511 of value and output
//   piece         64 tokens (or rows) x 64 columns: what one copy moves
//   part          a row of the schedule: the runs of one CTA
#pragma once

#include <cstdint>

#include "mla/params.h"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::mla::sm90 {

// 64 rows is what one wgmma computes; 64 tokens is one page.
constexpr int kTileRows = kFragmentRows;
constexpr int kPieceRows = 64;
static_assert(kTileRows == kPieceRows && kPageTokens == kPieceRows);

// The latent dimensions are pieces 0-7, the rotary ones piece 8.
constexpr int kPieces = kQueryDim / kPieceDims;
constexpr int kLatentPieces = kLatentDim / kPieceDims;
constexpr int kRopePiece = kLatentPieces;
constexpr uint32_t kPieceBytes = kPieceRows * kRowBytes;
constexpr uint32_t kTileBytes = kPieces * kPieceBytes;

// Pages alternate between two buffers and two owners, the even and the odd warpgroup: the owner computes a
// page's scores and softmax.
enum Parity { kEven = 0, kOdd = 1 };
constexpr int kBuffers = 2;
constexpr Parity other(Parity parity) { return parity == kEven ? kOdd : kEven; }

// The two warpgroups share one 64 x 512 output, half of the columns each.
enum Half { kLow = 0, kHigh = 1 };
constexpr int kHalves = 2;
constexpr int kHalfDims = kLatentDim / kHalves;
constexpr int kHalfPieces = kLatentPieces / kHalves;
constexpr Half half_of(Parity warpgroup) { return warpgroup == kEven ? kLow : kHigh; }
constexpr int first_piece(Half half) { return half * kHalfPieces; }

// One warp of a third warpgroup feeds them.
constexpr int kConsumerThreads = kHalves * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;

// Accumulator registers a thread holds.
constexpr int kScoreRegisters = accumulators(kPageTokens);
constexpr int kOutRegisters = accumulators(kHalfDims);

// How the registers are shared out. They come by the warp from four banks of 16384, one for each of the SM's
// partitions. A ninth warp of 224 registers would not fit in its bank next to two others, so what feeds the
// math is a warpgroup too, and hands over what it does not need of 3 x 168.
//
// kQuerySteps: how many of the 36 steps of 16 dimensions that a score sums over have their query operand in
// registers: the last ones. A step from shared memory reads 2 KB of query and 2 KB of key in the time the
// tensor cores take for it, a step with its query in registers half of that. With six the registers are full
// and ptxas serialises the products.
// kOwnProbabilities: whether a warpgroup multiplies with its own probabilities from registers.
// kMerges: whether CTAs can merge what they have cut; else a kernel behind does.

// For a feeder that only has copies made: one warp of it works.
struct WideConsumers {
  static constexpr int kRegisters = 240, kFeederRegisters = 24;
  static constexpr int kQuerySteps = 4;
  static constexpr bool kOwnProbabilities = true, kMerges = true;
};

// For a feeder that holds a page in registers. With less than all of this ptxas spills, or serialises the
// products.
struct NarrowConsumers {
  static constexpr int kRegisters = 200, kFeederRegisters = 104;
  static constexpr int kQuerySteps = 0;
  static constexpr bool kOwnProbabilities = false, kMerges = false;
};

}  // namespace pallas_attn::mla::sm90
