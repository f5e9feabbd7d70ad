// Shared memory of the kernel over tokens of 656 bytes, for row tiles of 64:
//
//   offset    bytes  what
//        0    73728  query tile, 9 pieces of 64 rows x 128 bytes: halves, rotary dimensions in bf16
//    73728    16384  probabilities of two pages, 64 rows x 64 tokens in halves
//    90112   125952  three pages as they are in the pool, 64 tokens x 656 bytes
//   216064     1024  scales of the value's tokens
//   217088     5120  of every row: factors, maxima, sums
//   and less than 4 KB of flags, barriers and the list of requests that were cut
//
// A tile of 32 or 16 rows leaves room for a fourth page.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "mla/combine/cut_list.h"
#include "mla/sm90/dense/run_walker.h"
#include "mla/sm90/dense/smem_plan.h"
#include "mla/sm90/transposed/config.h"

namespace pallas_attn::mla::sm90::transposed {

// A number of every query row, two neighbours of which can be had at once.
template <int kRows>
struct alignas(float2) PerRow {
  float of_row[kRows];

  __device__ float& operator[](int row) { return of_row[row]; }
  __device__ float operator[](int row) const { return of_row[row]; }
  __device__ float2& pair(int even_row) { return *reinterpret_cast<float2*>(of_row + even_row); }
  __device__ float2 pair(int even_row) const { return *reinterpret_cast<const float2*>(of_row + even_row); }
};

template <int kRows_>
struct alignas(1024) TransposedPlan {
  static constexpr int kRows = kRows_;
  static constexpr int kStages = kRows == 64 ? 3 : 4;
  static __device__ int next_stage(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }

  using Piece = SwizzledPiece<kRows>;
  using Scratch = MergeScratch<kLatentDim>;

  Piece query[kPieces];
  Piece probabilities[kOwners];
  alignas(1024) char pages[kStages][kPageBytes];

  // When the last run's products are done, no page is needed.
  __device__ Scratch& merge_scratch() { return *reinterpret_cast<Scratch*>(pages); }

  // By the page's owner: by what its bytes become values, in units of `unit`.
  __half token_scale[kOwners][kBlocks][kPageTokens];

  // Of a run. A score in base 2 is a product times row_factor; probabilities are relative to base, a product,
  // which follows the scores when one would be too large. Sums and outputs are multiplied by `rescale` (and
  // outputs by unit_rescale) then: of the newest page of each owner, if `moved`.
  PerRow<kRows> row_factor;
  PerRow<kRows> base;
  PerRow<kRows> rescale[kOwners];
  // On their way from warp to warp.
  PerRow<kRows> warp_peak[kWarpgroupWarps];
  PerRow<kRows> warp_sum[kOwners * kWarpgroupWarps];
  // Of a run behind its last product, for each warpgroup: by what its output is multiplied, and another one
  // that is added.
  PerRow<kRows> out_factor[kOwners];
  PerRow<kRows> others_factor[kOwners];

  float unit;
  float unit_rescale[kOwners];
  int moved[kOwners];
  float warp_scale[kWarpgroupWarps];
  // What is being worked on, where nobody needs it in a hurry; a copy for each warpgroup.
  PageRun run[kOwners];

  Ring<kStages, 1, 1> page_ring;
  int bad_page[kStages];
  CutList cuts;
};

static_assert(sizeof(TransposedPlan<16>) <= kSmemLimit && sizeof(TransposedPlan<32>) <= kSmemLimit);
static_assert(sizeof(TransposedPlan<64>) <= kSmemLimit);
static_assert(sizeof(TransposedPlan<64>::Scratch) <= sizeof(TransposedPlan<64>::pages));
static_assert(kPageBytes % 1024 == 0);

}  // namespace pallas_attn::mla::sm90::transposed
