// Values of keys that no query sees: their probabilities are zero, but zero times NaN is not.
#pragma once

#include "attention/sm90/forward/documents.h"
#include "attention/sm90/forward/smem_plan.h"
#include "attention/sm90/forward/turns.h"
#include "ptx/control.h"
#include "ptx/shared.h"

namespace pallas_attn::attention::sm90 {

// Of the key tile that begins with `first_key`, by all math warpgroups. `mixed`: others' keys lie between.
template <typename Shape>
__device__ __forceinline__ void clear_unseen(const ForwardParams& params, const Tile& tile, bool mixed,
                                             typename SmemPlan<Shape>::Values& values, int first_key,
                                             int thread) {
  constexpr int kKeys = Shape::kKeys;
  const int low = tile.seen_begin - first_key, high = tile.seen_end - first_key;
  if (low <= 0 && high >= kKeys && !mixed) return;
  constexpr int kChunks = kRowBytes / sizeof(uint4);
  for (int piece = 0; piece < Shape::kValuePieces; ++piece) {
#pragma unroll 1
    for (int i = thread; i < kKeys * kChunks; i += Shape::kConsumerThreads) {
      const int row = i / kChunks;
      const bool seen = row >= low && row < high;
      if (!seen || (mixed && !is_own_key(params, tile, first_key + row)))
        static_cast<uint4*>(values.row_of(piece, row))[i % kChunks] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_async_shared();
  ptx::named_barrier_sync_unaligned(kUnseenCleared, Shape::kConsumerThreads);
}

}  // namespace pallas_attn::attention::sm90
