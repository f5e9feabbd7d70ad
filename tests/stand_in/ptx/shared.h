#pragma once

#include "device.h"

namespace pallas_attn::ptx {

inline uint32_t shared_address(const void* pointer) {
  const long offset = static_cast<const char*>(pointer) - stand_in::shared;
  if (offset < 0 || offset >= static_cast<long>(stand_in::kSharedBytes)) {
    stand_in::fail("no shared memory at", offset);
  }
  return static_cast<uint32_t>(offset);
}

inline void fence_async_shared() {}
inline void fence_async_global() {}

inline void store_word(uint32_t address, uint32_t v) {
  stand_in::expect_aligned("a word at", address, 4);
  std::memcpy(stand_in::shared + address, &v, 4);
}

inline void store_16_bytes(uint32_t address, uint4 v) {
  stand_in::expect_aligned("16 bytes at", address, 16);
  std::memcpy(stand_in::shared + address, &v, 16);
}
inline uint4 load_shared_16_bytes(uint32_t address) {
  stand_in::expect_aligned("16 bytes at", address, 16);
  uint4 v;
  std::memcpy(&v, stand_in::shared + address, 16);
  return v;
}
inline void store_matrix_x4_transposed(uint32_t address, const uint32_t (&r)[4]) {
  stand_in::expect_aligned("a matrix's row at", address, 16);
  uint32_t addresses[32];
  for (int i = 0; i < 32; ++i) addresses[i] = stand_in::exchange(address, i);
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int right = 0; right < 2; ++right) {
      const int row = stand_in::lane() / 4, column = stand_in::lane() % 4 * 2 + right;
      const auto v = static_cast<uint16_t>(r[matrix] >> 16 * right);
      std::memcpy(stand_in::shared + addresses[matrix * 8 + column] + row * 2, &v, 2);
    }
  }
}

// Without a stand-in: named by the kernels of bf16, which are not built here.
void load_matrix_x4(uint32_t, uint32_t (&)[4]);
void store_matrix_x4(uint32_t, const uint32_t (&)[4]);

}  // namespace pallas_attn::ptx
