// Tile sizes and thread roles of the dense Hopper kernel.
#pragma once

#include <cstdint>

#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// 64 rows is what one wgmma computes; 64 tokens is one page.
constexpr int kTileRows = 64;
constexpr int kTileTokens = kPageTokens;

// The copy engine moves, and wgmma reads, pieces of 64 tokens (or rows) x 64 dimensions: 128 bytes wide, the
// widest swizzle. The latent part is pieces 0-7, the rotary part piece 8.
constexpr int kPieceDims = 64;
constexpr int kPieces = kQueryDim / kPieceDims;
constexpr int kLatentPieces = kLatentDim / kPieceDims;
constexpr int kHalfPieces = kLatentPieces / 2;
constexpr int kRopePiece = kLatentPieces;
constexpr uint32_t kRowBytes = kPieceDims * 2;
constexpr uint32_t kPieceBytes = kTileTokens * kRowBytes;
constexpr uint32_t kBlockBytes = kPieces * kPieceBytes;

constexpr int kBuffers = 2;

// Two warpgroups share one 64 x 512 output, half of the columns each; one warp of a third feeds them.
constexpr int kSides = 2;
constexpr int kHalfDims = kLatentDim / kSides;
constexpr int kSideThreads = 128;
constexpr int kSideWarps = kSideThreads / 32;
constexpr int kConsumerThreads = kSides * kSideThreads;
constexpr int kThreads = kConsumerThreads + kSideThreads;

// Registers come by the warp from four banks of 16384, one for each of the SM's partitions. A ninth warp of
// 224 registers would not fit in its bank next to two others, so the producer is a warpgroup (one warp of it
// works) that hands its registers over to the math: 3 x 168 at entry become 240 + 240 + 24.
constexpr int kConsumerRegisters = 240;
constexpr int kProducerRegisters = 24;

// Accumulator registers a thread holds.
constexpr int kScoreRegisters = kTileRows * kTileTokens / kSideThreads;
constexpr int kOutRegisters = kTileRows * kHalfDims / kSideThreads;

// How many of the 36 steps of 16 dimensions that a score sums over have their query operand in registers: the
// last ones. A step from shared memory reads 2 KB of query and 2 KB of key in the time the tensor cores take
// for it, a step with its query in registers half of that. With six the registers are full and ptxas
// serialises the products.
constexpr int kQueryRegisterSteps = 4;

// The running maximum follows the true one only when it falls behind by this many powers of two: exponentials
// stay below 2^8, exact enough in bf16 and far from fp16's limit, and the output is almost never rescaled.
constexpr float kRescaleSlack = 8.0f;

// Requests of at most this many splits are merged by the CTA of the first one, in its registers.
constexpr int kMostKeptSplits = 3;

// Below every real score, yet finite, so that differences of maxima are never NaN.
constexpr float kNoMaximum = -1e30f;

}  // namespace pallas_attn::mla::sm90
