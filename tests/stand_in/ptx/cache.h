#pragma once

#include "device.h"

namespace pallas_attn::ptx {

inline uint64_t l2_evict_first_policy() { return 0; }
inline uint64_t l2_evict_last_policy() { return 0; }

template <typename T>
void store_with_policy(void* to, T v, uint64_t) {
  stand_in::expect_aligned("a store at", reinterpret_cast<uint64_t>(to), sizeof(T));
  std::memcpy(to, &v, sizeof(T));
}

inline void store_past_l1(void* to, uint2 v) { store_with_policy(to, v, 0); }

inline int load_int(const int* source) { return *source; }
inline uint4 load_16_bytes(const void* source) {
  stand_in::expect_aligned("a load of 16 bytes", reinterpret_cast<uint64_t>(source), 16);
  return *static_cast<const uint4*>(source);
}
inline uint2 load_8_bytes(const void* source) {
  stand_in::expect_aligned("a load of 8 bytes", reinterpret_cast<uint64_t>(source), 8);
  return *static_cast<const uint2*>(source);
}
inline int fetch_and_increment(int* counter) { return (*counter)++; }
inline void prefetch_line(const void*) {}

// What was in the line is lost.
constexpr int kLineBytes = 128;
inline void discard_line(const void* line) {
  stand_in::expect_aligned("a line at", reinterpret_cast<uint64_t>(line), kLineBytes);
  std::memset(const_cast<void*>(line), 0xFF, kLineBytes);
}

}  // namespace pallas_attn::ptx
