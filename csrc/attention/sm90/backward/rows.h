// Numbers of a step's queries in shared memory.
#pragma once

namespace pallas_attn::attention::sm90::backward {

template <int kQueries>
struct alignas(16) Rows {
  float lse[kQueries / 2][4];    // of queries i and i + 1: maximum, maximum, rest, rest
  float delta[kQueries / 2][2];  // of both
  float slope;                   // ALiBi's, of their head

  __device__ static int lse_word(int query) { return query / 2 * 4 + query % 2; }
};

}  // namespace pallas_attn::attention::sm90::backward
