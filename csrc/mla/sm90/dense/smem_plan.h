// Shared memory of the dense Hopper kernel.
//
//   offset    bytes  what
//        0    73728  query tile, 9 pieces of 64 rows x 128 bytes
//    73728   147456  two pages of the cache, 9 pieces each; key and value are the same bytes
//   221184     8192  probabilities of the newest page, for the warpgroup that did not compute them
//   229376      256  running maximum of every row
//   229632      512  rescale factors of the newest even and odd page
//   230144     1024  row sums, by tile parity and warpgroup
//   231168      208  mbarriers
//   231376        8  flags of bad pages
//   = 231384, of the 232448 a CTA can have
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/sm90/dense/config.h"

namespace pallas_attn::mla::sm90 {

// Parts of a page buffer that become free at different moments.
enum BufferPart { kRopePart = 0, kLeftPart = 1, kRightPart = 2, kBufferParts = 3 };

struct alignas(1024) SmemPlan {
  using Piece = uint16_t[kTileTokens][kPieceDims];

  Piece sQ[kPieces];
  Piece sK[kBuffers][kPieces];
  Piece sP;

  float running_max[kTileRows];
  float rescale[kBuffers][kTileRows];
  float row_sum[2][kSides][kTileRows];

  uint64_t kv_full[kBuffers][kPieces];
  uint64_t kv_empty[kBuffers][kBufferParts];
  uint64_t query_full;
  uint64_t query_empty;
  int bad_page[kBuffers];
};

constexpr size_t kSmemLimit = 227 * 1024;
static_assert(offsetof(SmemPlan, sK) == 73728);
static_assert(offsetof(SmemPlan, sP) == 221184);
static_assert(offsetof(SmemPlan, running_max) == 229376);
static_assert(offsetof(SmemPlan, kv_full) == 231168);
static_assert(offsetof(SmemPlan, bad_page) == 231376);
static_assert(sizeof(SmemPlan) <= kSmemLimit);

}  // namespace pallas_attn::mla::sm90
