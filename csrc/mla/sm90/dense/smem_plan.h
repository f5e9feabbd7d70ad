// Shared memory of the dense Hopper kernel.
//
//   offset    bytes  what
//        0    73728  query tile, 9 pieces of 64 rows x 128 bytes
//    73728   147456  two pages of the cache, 9 pieces each; key and value are the same bytes
//   221184      256  running maximum of every row
//   221440      512  rescale factors of the newest even and odd page
//   221952     1024  row sums, by tile parity and warpgroup
//   222976      256  mbarriers
//   223232        8  flags of bad pages
//   223240     3084  requests that were cut
//   = 226324, of the 232448 a CTA can have (and 227328 with the struct's alignment)
//
// A page's probabilities (64 x 64, one piece), on their way to the warpgroup that did not compute them, need
// no space of their own: they take the place of the page's rotary piece, which nobody reads once its scores
// are complete and which is as long-lived as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/combine/merge.h"
#include "mla/sm90/dense/config.h"

namespace pallas_attn::mla::sm90 {

// Parts of a page buffer that become free at different moments: each when the warpgroup that multiplies with
// that half of the value is done with it. The rotary piece, holding probabilities by then, goes with the half
// of the warpgroup that reads them there, the one that does not own the page.
enum BufferPart { kLeftPart = 0, kRightPart = 1, kBufferParts = 2 };

// Partial results on their way to or from memory. Eight columns that nobody uses keep the rows of a warp's
// access in different banks.
struct PartialStage {
  float rows[kSides][kTileRows][kHalfDims + 8];
};

struct alignas(1024) SmemPlan {
  using Piece = uint16_t[kTileTokens][kPieceDims];

  Piece sQ[kPieces];
  Piece sK[kBuffers][kPieces];

  __device__ Piece& sP(int buffer) { return sK[buffer][kRopePiece]; }
  // When the last tile's products are done, no page is needed.
  __device__ PartialStage& partial_stage() { return *reinterpret_cast<PartialStage*>(sK); }
  __device__ MergeScratch& merge_scratch() { return *reinterpret_cast<MergeScratch*>(sK); }

  float running_max[kTileRows];
  float rescale[kBuffers][kTileRows];
  float row_sum[2][kSides][kTileRows];

  // Full: the piece has landed. Empty: the part may be overwritten.
  uint64_t kv_full[kBuffers][kPieces];
  uint64_t kv_empty[kBuffers][kBufferParts];
  uint64_t query_full;
  uint64_t query_empty;
  // A warp's rows of another split's result have landed.
  uint64_t partial_full[kSides][kSideWarps];
  int bad_page[kBuffers];
  CutList cuts;
};

constexpr size_t kSmemLimit = 227 * 1024;
static_assert(sizeof(MergeScratch) <= sizeof(SmemPlan::sK));
static_assert(sizeof(PartialStage) <= sizeof(SmemPlan::sK));
static_assert(offsetof(SmemPlan, sK) == 73728);
static_assert(offsetof(SmemPlan, running_max) == 221184);
static_assert(offsetof(SmemPlan, kv_full) == 222976);
static_assert(offsetof(SmemPlan, bad_page) == 223232);
static_assert(offsetof(SmemPlan, cuts) == 223240 && sizeof(CutList) == 3084);
static_assert(sizeof(SmemPlan) <= kSmemLimit);

}  // namespace pallas_attn::mla::sm90
