// Copies of whole tiles of queries, keys or values by the copy engine.
#pragma once

#include <cuda.h>

#include "blocksparse/sm90/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::blocksparse::sm90 {

struct Maps {
  CUtensorMap query, key, value;
};

// By one thread. What lies outside of the array reads as zero.
__device__ __forceinline__ void load_tile(SmemPlan::Piece (&to)[kPieces], const CUtensorMap& map,
                                          uint64_t* full, uint64_t policy, int head, int token) {
  ptx::mbarrier_arrive_expect_bytes(full, kTileBytes);
  for (int piece = 0; piece < kPieces; ++piece) {
    ptx::tma_load_3d(to[piece], &map, full, policy, piece * kPieceDims, head, token);
  }
}

}  // namespace pallas_attn::blocksparse::sm90
