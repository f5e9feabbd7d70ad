// Which pairs of a step count: on a fragment of keys by queries.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/smem_plan.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// Queries that each of a thread's two keys is seen by, in the step's query tile.
class Seen {
 public:
  __device__ __forceinline__ Seen(const Tile& tile, int first_query, int first_row,
                                  const FragmentPosition& at, int first_key) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = first_row + at.row(i), key = first_key + row;
      const Span queries = tile.band.queries_of(key, key);
      before_[i] = first_query + at.in_quad * 2 - queries.begin;
      count_[i] = row < tile.keys ? queries.end - queries.begin : 0;
    }
  }

  // The pair of register r.
  __device__ __forceinline__ bool operator()(int r) const {
    const int i = FragmentPosition::row_of(r);
    return static_cast<uint32_t>(before_[i] + r / 4 * 8 + r % 2) < count_[i];
  }

 private:
  int before_[kRowsPerThread];
  uint32_t count_[kRowsPerThread];
};

// All of them.
struct AllSeen {
  __device__ __forceinline__ bool operator()(int) const { return true; }
};

}  // namespace pallas_attn::attention::sm90::backward
