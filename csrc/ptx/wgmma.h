// wgmma: asynchronous warpgroup matrix products, accumulating in registers.
//
// Operands in shared memory lie under the 128-byte swizzle, in pieces of 64 (the contiguous dimension, 128
// bytes) by any multiple of 8, each piece starting at a multiple of 1024 bytes:
//   * K-major (the contiguous dimension is the one summed over): rows of 8 follow each other, or at
//     `eight_bytes`.
//   * MN-major (the contiguous dimension is the output's): the same, and neighbouring pieces of 64 outputs
//     follow each other at the leading offset.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

constexpr uint32_t kSwizzleAtomBytes = 1024;  // 8 rows of 128 bytes

__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, uint32_t leading_bytes,
                                                     uint32_t eight_bytes = kSwizzleAtomBytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((shared_address(tile) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | static_cast<uint64_t>(eight_bytes >> 4) << 32 |
         kSwizzle128 << 62;
}

// The start address is the descriptor's lowest field, in units of 16 bytes, and never overflows into others.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// The same of an MN-major operand of up to two pieces, of which the second one stays where it is.
__device__ __forceinline__ uint64_t advance_first_piece(uint64_t descriptor, uint32_t bytes) {
  return advance_descriptor(descriptor, bytes) - (static_cast<uint64_t>(bytes >> 4) << 16);
}

// The same for all threads of a warp: through a shuffle the compiler knows, and adds to it once a warp.
__device__ __forceinline__ uint64_t uniform_descriptor(uint64_t descriptor) {
  return (descriptor & 0xFFFFFFFF00000000) | __shfl_sync(0xffffffff, static_cast<uint32_t>(descriptor), 0);
}

// Orders earlier register writes (accumulators, A fragments) before the matrix products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that these registers change here, so that it moves no access to them across an
// asynchronous product it cannot see into.
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// The same of registers that a product is about to write: what they hold is kept no longer.
template <int kCount>
__device__ __forceinline__ void wgmma_claim(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i])::"memory");
}

template <int kSteps>
__device__ __forceinline__ void wgmma_touch(uint32_t (&registers)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
}

// Which dimension of B is contiguous in shared memory.
enum Major { kKMajor = 0, kMNMajor = 1 };

// An asm statement cannot take an array apart, so the preprocessor spells the list of accumulators: for each
// of the numbers 1 to n - 1, once for the instruction's text and once for its operands.
// clang-format off
#define PALLAS_ATTN_TEN(use, tens)                                                                \
  use(tens##0) use(tens##1) use(tens##2) use(tens##3) use(tens##4)                                \
  use(tens##5) use(tens##6) use(tens##7) use(tens##8) use(tens##9)
#define PALLAS_ATTN_1_TO_9(use)                                                                   \
  use(1) use(2) use(3) use(4) use(5) use(6) use(7) use(8) use(9)
#define PALLAS_ATTN_1_TO_3(use) use(1) use(2) use(3)
#define PALLAS_ATTN_1_TO_7(use) use(1) use(2) use(3) use(4) use(5) use(6) use(7)
#define PALLAS_ATTN_1_TO_15(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) use(10) use(11) use(12) use(13) use(14) use(15)
#define PALLAS_ATTN_1_TO_23(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) use(20) use(21) use(22) use(23)
#define PALLAS_ATTN_1_TO_31(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) PALLAS_ATTN_TEN(use, 2) use(30) use(31)
#define PALLAS_ATTN_1_TO_35(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) PALLAS_ATTN_TEN(use, 2)                         \
  use(30) use(31) use(32) use(33) use(34) use(35)
#define PALLAS_ATTN_1_TO_39(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) PALLAS_ATTN_TEN(use, 2) PALLAS_ATTN_TEN(use, 3)
#define PALLAS_ATTN_1_TO_47(use)                                                                  \
  PALLAS_ATTN_1_TO_39(use)                                                                        \
  use(40) use(41) use(42) use(43) use(44) use(45) use(46) use(47)
#define PALLAS_ATTN_1_TO_55(use)                                                                  \
  PALLAS_ATTN_1_TO_39(use) PALLAS_ATTN_TEN(use, 4)                                                \
  use(50) use(51) use(52) use(53) use(54) use(55)
#define PALLAS_ATTN_1_TO_63(use)                                                                  \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) PALLAS_ATTN_TEN(use, 2) PALLAS_ATTN_TEN(use, 3) \
  PALLAS_ATTN_TEN(use, 4) PALLAS_ATTN_TEN(use, 5) use(60) use(61) use(62) use(63)
#define PALLAS_ATTN_1_TO_79(use)                                                                  \
  PALLAS_ATTN_1_TO_39(use) PALLAS_ATTN_TEN(use, 4) PALLAS_ATTN_TEN(use, 5) PALLAS_ATTN_TEN(use, 6) \
  PALLAS_ATTN_TEN(use, 7)
#define PALLAS_ATTN_1_TO_95(use)                                                                  \
  PALLAS_ATTN_1_TO_39(use) PALLAS_ATTN_TEN(use, 4) PALLAS_ATTN_TEN(use, 5) PALLAS_ATTN_TEN(use, 6) \
  PALLAS_ATTN_TEN(use, 7) PALLAS_ATTN_TEN(use, 8) use(90) use(91) use(92) use(93) use(94) use(95)
#define PALLAS_ATTN_1_TO_127(use)                                                                 \
  PALLAS_ATTN_1_TO_9(use) PALLAS_ATTN_TEN(use, 1) PALLAS_ATTN_TEN(use, 2) PALLAS_ATTN_TEN(use, 3) \
  PALLAS_ATTN_TEN(use, 4) PALLAS_ATTN_TEN(use, 5) PALLAS_ATTN_TEN(use, 6) PALLAS_ATTN_TEN(use, 7) \
  PALLAS_ATTN_TEN(use, 8) PALLAS_ATTN_TEN(use, 9) PALLAS_ATTN_TEN(use, 10) PALLAS_ATTN_TEN(use, 11) \
  use(120) use(121) use(122) use(123) use(124) use(125) use(126) use(127)
#define PALLAS_ATTN_TEXT(i) ", %" #i
#define PALLAS_ATTN_OPERAND(i) , "+f"(d[i])

// The start of every form, up to its operands A and B: `flag` is the number of `accumulate`.
#define PALLAS_ATTN_START(type, columns, list, flag)                                              \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #flag ", 0;\n"                                             \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                           \
  " {%0" list(PALLAS_ATTN_TEXT) "}, "

// One width of B, with A in registers and with A in shared memory (K-major). n0, n1, ... are the numbers of the
// operands behind the accumulators.
#define PALLAS_ATTN_WGMMA(type, columns, list, n0, n1, n2, n3, n4, n5, n6)                        \
  if constexpr (std::is_same_v<A, const uint32_t[4]>) {                                           \
    asm volatile(PALLAS_ATTN_START(type, columns, list, n5)                                       \
                 "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}\n"    \
                 : "+f"(d[0]) list(PALLAS_ATTN_OPERAND)                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                            \
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorB)));            \
  } else {                                                                                        \
    asm volatile(PALLAS_ATTN_START(type, columns, list, n2)                                       \
                 "%" #n0 ", %" #n1 ", p, 1, 1, 0, %" #n3 ";\n}\n"                                 \
                 : "+f"(d[0]) list(PALLAS_ATTN_OPERAND)                                           \
                 : "l"(a), "l"(b),                                                                \
                   "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorB)));            \
  }
#define PALLAS_ATTN_WGMMA_OF_WIDTH(type)                                                          \
  if constexpr (kColumns == 8) {                                                                  \
    PALLAS_ATTN_WGMMA(type, 8, PALLAS_ATTN_1_TO_3, 4, 5, 6, 7, 8, 9, 10)                          \
  } else if constexpr (kColumns == 16) {                                                          \
    PALLAS_ATTN_WGMMA(type, 16, PALLAS_ATTN_1_TO_7, 8, 9, 10, 11, 12, 13, 14)                     \
  } else if constexpr (kColumns == 32) {                                                          \
    PALLAS_ATTN_WGMMA(type, 32, PALLAS_ATTN_1_TO_15, 16, 17, 18, 19, 20, 21, 22)                  \
  } else if constexpr (kColumns == 48) {                                                          \
    PALLAS_ATTN_WGMMA(type, 48, PALLAS_ATTN_1_TO_23, 24, 25, 26, 27, 28, 29, 30)                  \
  } else if constexpr (kColumns == 64) {                                                          \
    PALLAS_ATTN_WGMMA(type, 64, PALLAS_ATTN_1_TO_31, 32, 33, 34, 35, 36, 37, 38)                  \
  } else if constexpr (kColumns == 72) {                                                          \
    PALLAS_ATTN_WGMMA(type, 72, PALLAS_ATTN_1_TO_35, 36, 37, 38, 39, 40, 41, 42)                  \
  } else if constexpr (kColumns == 80) {                                                          \
    PALLAS_ATTN_WGMMA(type, 80, PALLAS_ATTN_1_TO_39, 40, 41, 42, 43, 44, 45, 46)                  \
  } else if constexpr (kColumns == 96) {                                                          \
    PALLAS_ATTN_WGMMA(type, 96, PALLAS_ATTN_1_TO_47, 48, 49, 50, 51, 52, 53, 54)                  \
  } else if constexpr (kColumns == 112) {                                                         \
    PALLAS_ATTN_WGMMA(type, 112, PALLAS_ATTN_1_TO_55, 56, 57, 58, 59, 60, 61, 62)                 \
  } else if constexpr (kColumns == 160) {                                                         \
    PALLAS_ATTN_WGMMA(type, 160, PALLAS_ATTN_1_TO_79, 80, 81, 82, 83, 84, 85, 86)                 \
  } else if constexpr (kColumns == 192) {                                                         \
    PALLAS_ATTN_WGMMA(type, 192, PALLAS_ATTN_1_TO_95, 96, 97, 98, 99, 100, 101, 102)              \
  } else if constexpr (kColumns == 128) {                                                         \
    PALLAS_ATTN_WGMMA(type, 128, PALLAS_ATTN_1_TO_63, 64, 65, 66, 67, 68, 69, 70)                 \
  } else {                                                                                        \
    static_assert(kColumns == 256, "a width without its list of accumulators");                   \
    PALLAS_ATTN_WGMMA(type, 256, PALLAS_ATTN_1_TO_127, 128, 129, 130, 131, 132, 133, 134)         \
  }
// clang-format on

// d[64 x columns] += A[64 x 16] B[16 x columns]; or d = A B. A is a fragment of registers or the descriptor
// of a K-major operand, B a descriptor.
template <typename Element, Major kMajorB, int kAccumulators, typename A>
__device__ __forceinline__ void wgmma_k16(float (&d)[kAccumulators], A& a, uint64_t b, bool accumulate) {
  constexpr int kColumns = kAccumulators * 2;
  static_assert(std::is_same_v<A, const uint32_t[4]> || std::is_same_v<A, const uint64_t>);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    PALLAS_ATTN_WGMMA_OF_WIDTH("bf16")
  } else {
    static_assert(std::is_same_v<Element, __half>);
    PALLAS_ATTN_WGMMA_OF_WIDTH("f16")
  }
}

#undef PALLAS_ATTN_WGMMA_OF_WIDTH
#undef PALLAS_ATTN_WGMMA
#undef PALLAS_ATTN_START
#undef PALLAS_ATTN_OPERAND
#undef PALLAS_ATTN_TEXT
#undef PALLAS_ATTN_1_TO_127
#undef PALLAS_ATTN_1_TO_95
#undef PALLAS_ATTN_1_TO_63
#undef PALLAS_ATTN_1_TO_55
#undef PALLAS_ATTN_1_TO_47
#undef PALLAS_ATTN_1_TO_39
#undef PALLAS_ATTN_1_TO_35
#undef PALLAS_ATTN_1_TO_31
#undef PALLAS_ATTN_1_TO_23
#undef PALLAS_ATTN_1_TO_15
#undef PALLAS_ATTN_1_TO_7
#undef PALLAS_ATTN_1_TO_3
#undef PALLAS_ATTN_1_TO_9
#undef PALLAS_ATTN_TEN

}  // namespace pallas_attn::ptx
