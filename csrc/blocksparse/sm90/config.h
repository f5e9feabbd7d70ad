// Tile sizes and thread roles of block-sparse prefill on Hopper, and the words for them:
//
//   tile       128 neighbouring queries of one head, which lie in one row of the layout
//   half       64 of its queries, those of one math warpgroup
//   key tile   128 neighbouring keys in one block, or their values
//   own        at the queries' own positions
//   piece      128 tokens x 64 columns: what one copy moves
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"

namespace pallas_attn::blocksparse::sm90 {

constexpr int kTileShift = 7;
constexpr int kTileQueries = 1 << kTileShift;
constexpr int kTileKeys = kTileQueries;
constexpr int kHeadDim = 128;
constexpr int kPieces = kHeadDim / kPieceDims;
constexpr uint32_t kPieceBytes = kTileKeys * kRowBytes;
constexpr uint32_t kTileBytes = kPieces * kPieceBytes;

constexpr int kHalves = kTileQueries / kFragmentRows;
constexpr int kConsumerThreads = kHalves * kWarpgroupThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;

// Of the third warpgroup, one warp each.
enum Feeder { kScout = 0, kKeyLoader = 1, kValueLoader = 2 };
constexpr int kLoaders = 2;

// Key tiles, and values of such, that are in shared memory or on their way there: keys are needed a step
// earlier.
constexpr int kKeyStages = 3, kValueStages = 2;
// Tiles of queries: the one at work, and the next one.
constexpr int kSlots = 2;
PALLAS_ATTN_HOST_DEVICE constexpr int next_slot(int slot) { return slot + 1 == kSlots ? 0 : slot + 1; }

constexpr int kScoreRegisters = accumulators(kTileKeys);
constexpr int kOutRegisters = accumulators(kHeadDim);

// A thread's registers, of 3 x 168.
constexpr int kConsumerRegisters = 224, kFeederRegisters = 56;
static_assert(kHalves * kConsumerRegisters + kFeederRegisters <= 3 * 168);

}  // namespace pallas_attn::blocksparse::sm90
