// Products with A in registers and B K-major in shared memory, at once.
#pragma once

#include <type_traits>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

inline uint64_t wgmma_descriptor(const void* tile, uint32_t) {
  stand_in::expect_aligned("an operand at", shared_address(tile), 1024);
  return shared_address(tile) >> 4;
}
inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kCount>
void wgmma_touch(float (&)[kCount]) {}
template <int kSteps>
void wgmma_touch(uint32_t (&)[kSteps][4]) {}

enum Major { kKMajor = 0, kMNMajor = 1 };

template <typename Element>
float number(uint16_t bits) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  } else {
    static const std::vector<float> numbers = [] {
      std::vector<float> all(1 << 16);
      for (int i = 0; i < 1 << 16; ++i) all[i] = __half2float(__half(__half_raw{static_cast<uint16_t>(i)}));
      return all;
    }();
    return numbers[bits];
  }
}

template <typename Element, Major kMajorB, int kAccumulators, typename A>
void wgmma_k16(float (&d)[kAccumulators], A& a, uint64_t b, bool accumulate) {
  static_assert(kMajorB == kKMajor && std::is_same_v<A, const uint32_t[4]>);
  const int group = stand_in::self->thread / 128, thread = stand_in::self->thread % 128;
  auto& fragment = stand_in::cta().fragment[group];
  stand_in::Meeting& meeting = stand_in::cta().warpgroup[group];
  std::memcpy(fragment[thread], a, 16);
  meeting.wait();
  // The thread's two rows of A.
  float rows[2][16];
  for (int pair = 0; pair < 4; ++pair) {
    for (int r = 0; r < 4; ++r) {
      for (int right = 0; right < 2; ++right) {
        const uint32_t word = fragment[thread / 4 * 4 + pair][r];
        rows[r % 2][pair * 2 + right + r / 2 * 8] =
            number<Element>(static_cast<uint16_t>(word >> 16 * right));
      }
    }
  }
  const uint32_t start = static_cast<uint32_t>(b) << 4;
  for (int i = 0; i < kAccumulators; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      uint32_t at = start + column / 8 * 1024 + column % 8 * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      uint16_t bits;
      std::memcpy(&bits, stand_in::shared + at, 2);
      sum += rows[i / 2 % 2][k] * number<Element>(bits);
    }
    d[i] = accumulate ? d[i] + sum : sum;
  }
  meeting.wait();
}

}  // namespace pallas_attn::ptx
