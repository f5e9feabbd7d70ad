// Numbers of a step's queries in shared memory.
#pragma once

namespace pallas_attn::attention::sm90::backward {

// In the order of fragments [keys, queries]: a thread, which has two of every eight columns, loads 16 bytes
// at a time.
template <int kQueries>
struct alignas(16) Rows {
  float lse[kQueries / 2][4];    // of columns c and c + 1: maximum, maximum, rest, rest
  float delta[kQueries / 4][4];  // of columns c, c + 1, c + 8 and c + 9
  float slope;                   // ALiBi's, of their head

  __device__ static int lse_word(int column) { return column / 2 * 4 + column % 2; }
  __device__ static int delta_word(int column) {
    return (column / 16 * 4 + column % 8 / 2) * 4 + column / 8 % 2 * 2 + column % 2;
  }
};

}  // namespace pallas_attn::attention::sm90::backward
