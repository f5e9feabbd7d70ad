// Products at once, or where late ones are asked for, when they are committed or waited for.
#pragma once

#include <type_traits>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

constexpr uint32_t kSwizzleAtomBytes = 1024;

inline uint64_t wgmma_descriptor(const void* tile, uint32_t leading_bytes,
                                 uint32_t eight_bytes = kSwizzleAtomBytes) {
  stand_in::expect_aligned("an operand at", shared_address(tile), 1024);
  return shared_address(tile) >> 4 | leading_bytes >> 4 << 16 | uint64_t{eight_bytes >> 4} << 32;
}

// An element of an operand: `outer` rows of 128 bytes down, `inner` elements along them.
inline uint16_t element_at(uint64_t descriptor, int outer, int inner) {
  const uint32_t leading = static_cast<uint32_t>(descriptor >> 16 & 0xFFFF) << 4;
  const uint32_t eight = static_cast<uint32_t>(descriptor >> 32 & 0xFFFF) << 4;
  uint32_t at = static_cast<uint32_t>(descriptor & 0xFFFF) << 4;
  at += inner / 64 * leading + outer / 8 * eight + outer % 8 * 128 + inner % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, stand_in::shared + at, 2);
  return bits;
}
inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }
inline uint64_t advance_first_piece(uint64_t descriptor, uint32_t bytes) {
  return advance_descriptor(descriptor, bytes) - (static_cast<uint64_t>(bytes >> 4) << 16);
}
inline uint64_t uniform_descriptor(uint64_t descriptor) {
  if (stand_in::exchange(static_cast<uint32_t>(descriptor), 0) != static_cast<uint32_t>(descriptor)) {
    stand_in::fail("descriptors that differ within a warp", stand_in::warp());
  }
  return descriptor;
}

inline void wgmma_fence() {}
inline void finish_products(size_t but) {
  auto& groups = stand_in::self->products;
  while (groups.size() > but + 1) {
    for (const auto& product : groups[0]) product();
    groups.erase(groups.begin());
  }
}
// All threads of a warpgroup have committed as many, and draw the same.
inline void wgmma_commit() {
  stand_in::self->products.emplace_back();
  if (++stand_in::self->committed * 2654435761u >> 31) finish_products(0);
}
template <int kPending>
void wgmma_wait() {
  finish_products(kPending);
}
template <int kCount>
void wgmma_touch(float (&)[kCount]) {}
template <int kCount>
void wgmma_claim(float (&)[kCount]) {}
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

inline uint64_t descriptor_of(uint64_t operand) { return operand; }
inline uint64_t descriptor_of(const uint32_t (&)[4]) { return 0; }

template <typename Element, Major kMajorB, int kAccumulators, typename A>
void multiply(float (&d)[kAccumulators], A& a, uint64_t b, bool accumulate) {
  constexpr bool kFromRegisters = std::is_same_v<A, const uint32_t[4]>;
  const int group = stand_in::self->thread / 128, thread = stand_in::self->thread % 128;
  auto& fragment = stand_in::cta().fragment[group];
  stand_in::Meeting& meeting = stand_in::cta().warpgroup[group];
  if constexpr (kFromRegisters) std::memcpy(fragment[thread], a, 16);
  meeting.wait();
  // The thread's two rows of A.
  float rows[2][16];
  for (int i = 0; !kFromRegisters && i < 2; ++i) {
    const int row = thread / 32 * 16 + i * 8 + thread % 32 / 4;
    for (int k = 0; k < 16; ++k) rows[i][k] = number<Element>(element_at(descriptor_of(a), row, k));
  }
  for (int pair = 0; kFromRegisters && pair < 4; ++pair) {
    for (int r = 0; r < 4; ++r) {
      for (int right = 0; right < 2; ++right) {
        const uint32_t word = fragment[thread / 4 * 4 + pair][r];
        rows[r % 2][pair * 2 + right + r / 2 * 8] =
            number<Element>(static_cast<uint16_t>(word >> 16 * right));
      }
    }
  }
  for (int i = 0; i < kAccumulators; ++i) {
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint16_t bits = kMajorB == kKMajor ? element_at(b, column, k) : element_at(b, k, column);
      sum += rows[i / 2 % 2][k] * number<Element>(bits);
    }
    d[i] = accumulate ? d[i] + sum : sum;
  }
  meeting.wait();
}

template <typename Element, Major kMajorB, int kAccumulators, typename A>
void wgmma_k16(float (&d)[kAccumulators], A& a, uint64_t b, bool accumulate) {
  if (!stand_in::late_products) return multiply<Element, kMajorB>(d, a, b, accumulate);
  stand_in::Group& group = stand_in::self->products.back();
  if constexpr (std::is_same_v<A, const uint32_t[4]>) {
    group.push_back([&d, &a, b, accumulate] { multiply<Element, kMajorB>(d, a, b, accumulate); });
  } else {
    static_assert(std::is_same_v<A, const uint64_t>);
    group.push_back([&d, a, b, accumulate] { multiply<Element, kMajorB>(d, a, b, accumulate); });
  }
}

}  // namespace pallas_attn::ptx
