// Which pairs of a step count: on a fragment of keys by queries.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/smem_plan.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// Queries that each of a thread's two keys is seen by, in a step's query tile.
class Seen {
 public:
  __device__ __forceinline__ Seen(const BackwardParams& params, const Tile& tile, int first_query,
                                  int first_row, const FragmentPosition& at) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int key = tile.first + first_row + at.row(i);
      const Span queries = tile.band.queries_of(key, key);
      before_[i] = first_query + at.in_quad * 2 - queries.begin;
      count_[i] = tile.has_key(params, key) ? queries.end - queries.begin : 0;
    }
  }

  // What is not seen, whatever it is, becomes zero.
  template <int kCount>
  __device__ __forceinline__ void mask(float (&d)[kCount]) const {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const int i = FragmentPosition::row_of(r);
      if (static_cast<uint32_t>(before_[i] + r / 4 * 8 + r % 2) >= count_[i]) d[r] = 0.0f;
    }
  }

 private:
  int before_[kRowsPerThread];
  uint32_t count_[kRowsPerThread];
};

// The same where other documents' queries lie between: columns that are not the document's.
template <int kCount>
__device__ __forceinline__ void mask_others(float (&d)[kCount], const BackwardParams& params,
                                            const Tile& tile, int first_query, int lane, int in_quad) {
#pragma unroll
  for (int word = 0; word < kCount / 16; ++word) {
    const int query = first_query + word * 32 + lane;
    const uint32_t own = __ballot_sync(0xffffffff, tile.has_query(params, query)) >> (in_quad * 2);
#pragma unroll
    for (int r = word * 16; r < word * 16 + 16; ++r) {
      if ((own & 1u << (r / 4 * 8 % 32 + r % 2)) == 0) d[r] = 0.0f;
    }
  }
}

}  // namespace pallas_attn::attention::sm90::backward
