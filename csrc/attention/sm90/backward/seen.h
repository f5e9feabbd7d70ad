// Which pairs of a step count: on a fragment of held by met tokens.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/tile_list.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward {

// What each of a thread's two held tokens meets of a step's.
template <Side kSide>
class Seen {
 public:
  __device__ __forceinline__ Seen(const BackwardParams& params, const Tile& tile, int first_met,
                                  int first_row, const FragmentPosition& at) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int own = tile.first + first_row + at.row(i);
      const Span met = kSide == Side::kKeys ? tile.band.queries_of(own, own) : tile.band.keys_of(own, own);
      before_[i] = first_met + at.in_quad * 2 - met.begin;
      count_[i] = tile.has<kSide>(params, own) ? met.end - met.begin : 0;
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

// The same where other documents' tokens lie between: columns that are not the document's.
template <Side kMetSide, int kCount>
__device__ __forceinline__ void mask_others(float (&d)[kCount], const BackwardParams& params,
                                            const Tile& tile, int first_met, int lane, int in_quad) {
#pragma unroll
  for (int word = 0; word < kCount / 16; ++word) {
    const bool has = tile.has<kMetSide>(params, first_met + word * 32 + lane);
    const uint32_t own = __ballot_sync(0xffffffff, has) >> (in_quad * 2);
#pragma unroll
    for (int r = word * 16; r < word * 16 + 16; ++r) {
      if ((own & 1u << (r / 4 * 8 % 32 + r % 2)) == 0) d[r] = 0.0f;
    }
  }
}

}  // namespace pallas_attn::attention::sm90::backward
