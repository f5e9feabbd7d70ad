// Shared memory of the sparse Hopper kernels: the dense one's, and behind it
//
//   offset    bytes  what
//   227328       16  which tokens of a tile are there, a bit each
//   227344     1024  largest logit of every row, of every second run and of each warpgroup
//   = 228368, of the 232448 a CTA can have
#pragma once

#include "mla/sm90/dense/smem_plan.h"

namespace pallas_attn::mla::sm90 {

struct SparsePlan : SmemPlan {
  uint64_t held[kBuffers];
  float peak[2][kHalves][kTileRows];
};

static_assert(sizeof(SmemPlan) == 227328);
static_assert(sizeof(SparsePlan) <= kSmemLimit);

}  // namespace pallas_attn::mla::sm90
