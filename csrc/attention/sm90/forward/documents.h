// Documents whose tokens do not lie in one piece: which rows and which keys of a tile are its document's.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90 {

// Whether the tile's row is a query to answer.
template <Form kForm>
__device__ __forceinline__ bool is_answered(const ForwardParams& params, const Tile& tile, const Group& group,
                                            int row) {
  if (row >= tile.tokens * group.size) return false;
  if (kForm != Form::kFull || tile.q_rank < 0) return true;
  const int64_t token = int64_t{tile.batch} * params.q_len + tile.token + group.query_of(row);
  return __ldg(params.q_ranks + token) == tile.q_rank;
}

// Of a sequence's keys; those behind the last are nobody's.
__device__ __forceinline__ bool is_own_key(const ForwardParams& params, const Tile& tile, int key) {
  if (key >= tile.k_len) return false;
  return __ldg(params.k_ranks + int64_t{tile.batch} * params.kv_len + tile.k_begin + key) == tile.k_rank;
}

// A bit for each of a key tile's keys, found by a warp together.
template <int kKeys>
struct OwnKeys {
  static_assert(kKeys % 32 == 0);
  uint32_t words[kKeys / 32];

  __device__ __forceinline__ OwnKeys(const ForwardParams& params, const Tile& tile, int first_key, int lane) {
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      words[i] = __ballot_sync(~0u, is_own_key(params, tile, first_key + i * 32 + lane));
    }
  }

  // Scores with the others' keys count for nothing.
  template <int kCount>
  __device__ __forceinline__ void mask_others(float (&rS)[kCount], const FragmentPosition& at) const {
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const uint32_t own = words[i] >> (at.in_quad * 2);
#pragma unroll
      for (int r = i * 16; r < i * 16 + 16; ++r) {
        if ((own & 1u << (r / 4 * 8 % 32 + r % 2)) == 0) rS[r] = -INFINITY;
      }
    }
  }
};

}  // namespace pallas_attn::attention::sm90
