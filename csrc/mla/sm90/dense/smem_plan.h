// Shared memory of the dense Hopper kernel.
//
//   offset    bytes  what
//        0    73728  query tile, 9 pieces of 64 rows x 128 bytes
//    73728   147456  two pages of the cache, 9 pieces each; key and value are the same bytes
//   221184      256  running maximum of every row
//   221440      512  rescale factors of the newest even and odd page
//   221952     1024  row sums, of every second run and of each warpgroup
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

#include "mla/combine/cut_list.h"
#include "mla/sm90/dense/config.h"
#include "sm90/merge.h"
#include "sm90/ring.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::mla::sm90 {

// Partial results on their way to or from memory. Eight columns that nobody uses keep the rows of a warp's
// access in different banks.
struct PartialStage {
  float rows[kHalves][kTileRows][kHalfDims + 8];
};

struct alignas(1024) SmemPlan {
  using Piece = SwizzledPiece<kPieceRows>;
  using Scratch = MergeScratch<kLatentDim>;

  Piece sQ[kPieces];
  Piece sK[kBuffers][kPieces];

  __device__ Piece& sP(int buffer) { return sK[buffer][kRopePiece]; }
  // When the last run's products are done, no page is needed.
  __device__ PartialStage& partial_stage() { return *reinterpret_cast<PartialStage*>(sK); }
  __device__ Scratch& merge_scratch() { return *reinterpret_cast<Scratch*>(sK); }

  float running_max[kTileRows];
  float rescale[kBuffers][kTileRows];
  float row_sum[2][kHalves][kTileRows];

  // A page lands piece by piece. It is handed back in two halves, each when the warpgroup that multiplies
  // with that half of the value is done with it. The rotary piece, holding probabilities by then, goes with
  // the half of the warpgroup that reads them there, the one that does not own the page.
  Ring<kBuffers, kPieces, kHalves> pages;
  Ring<1, 1, 1> query;
  // A warp's rows of another split's result have landed.
  uint64_t partial_full[kHalves][kWarpgroupWarps];
  int bad_page[kBuffers];
  CutList cuts;
};

static_assert(sizeof(SmemPlan::Scratch) <= sizeof(SmemPlan::sK));
static_assert(sizeof(PartialStage) <= sizeof(SmemPlan::sK));
static_assert(offsetof(SmemPlan, sK) == 73728);
static_assert(offsetof(SmemPlan, running_max) == 221184);
static_assert(offsetof(SmemPlan, pages) == 222976);
static_assert(offsetof(SmemPlan, bad_page) == 223232);
static_assert(offsetof(SmemPlan, cuts) == 223240 && sizeof(CutList) == 3084);
static_assert(sizeof(SmemPlan) <= kSmemLimit);

}  // namespace pallas_attn::mla::sm90
