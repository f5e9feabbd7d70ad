// wgmma: asynchronous warpgroup matrix products, accumulating in registers.
//
// Only the four forms this library uses. Both operands in shared memory lie under the 128-byte swizzle, in
// pieces of 64 (the contiguous dimension, 128 bytes) by any multiple of 8, each piece starting at a multiple
// of 1024 bytes:
//   * K-major (the contiguous dimension is the one summed over): rows of 8 follow each other every 1024
//   bytes.
//   * MN-major (the contiguous dimension is the output's): the same, and neighbouring pieces of 64 outputs
//   follow each
//     other at the leading offset.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

constexpr uint32_t kSwizzleAtomBytes = 1024;  // 8 rows of 128 bytes

__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((shared_address(tile) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(kSwizzleAtomBytes >> 4) << 32 | kSwizzle128 << 62;
}

// The start address is the descriptor's lowest field, in units of 16 bytes.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
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

// clang-format off
#define PALLAS_ATTN_ACC8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),        \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define PALLAS_ATTN_ACC32(d, i)                                                                      \
  PALLAS_ATTN_ACC8(d, i), PALLAS_ATTN_ACC8(d, i + 8), PALLAS_ATTN_ACC8(d, i + 16), PALLAS_ATTN_ACC8(d, i + 24)
#define PALLAS_ATTN_ACC128(d) \
  PALLAS_ATTN_ACC32(d, 0), PALLAS_ATTN_ACC32(d, 32), PALLAS_ATTN_ACC32(d, 64), PALLAS_ATTN_ACC32(d, 96)

// The same registers in the instruction's text.
#define PALLAS_ATTN_TEXT32                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PALLAS_ATTN_TEXT128                                                           \
  PALLAS_ATTN_TEXT32                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "  \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "  \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "  \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One product: `shape` such as "m64n64k16", `type` of the operands, accumulators as text and as operands, the rest
// of the instruction's text with `flag` the placeholder of `accumulate`, then the operands A and B.
#define PALLAS_ATTN_WGMMA(shape, type, text, d, flag, rest, ...)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                      \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" text "}, " rest ";\n}\n" \
               : d : __VA_ARGS__, "r"(static_cast<int>(accumulate)))
#define PALLAS_ATTN_WGMMA_OF_ELEMENT(shape, text, d, flag, rest, ...)                                 \
  static_assert(std::is_same_v<Element, __nv_bfloat16> || std::is_same_v<Element, __half>);          \
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                                            \
    PALLAS_ATTN_WGMMA(shape, "bf16", text, PALLAS_ATTN_UNPACK d, flag, rest, __VA_ARGS__);           \
  } else {                                                                                           \
    PALLAS_ATTN_WGMMA(shape, "f16", text, PALLAS_ATTN_UNPACK d, flag, rest, __VA_ARGS__);            \
  }
#define PALLAS_ATTN_UNPACK(...) __VA_ARGS__

// d[64 x 64] += A[64 x 16] B[64 x 16]^T: A in registers, B K-major in shared memory.
template <typename Element>
__device__ __forceinline__ void wgmma_m64n64k16_a_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  PALLAS_ATTN_WGMMA_OF_ELEMENT("m64n64k16", PALLAS_ATTN_TEXT32, (PALLAS_ATTN_ACC32(d, 0)), "%37",
                               "{%32, %33, %34, %35}, %36, p, 1, 1, 0",
                               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
}

// d[64 x 64] += A[64 x 16] B[64 x 16]^T, both K-major in shared memory.
template <typename Element>
__device__ __forceinline__ void wgmma_m64n64k16_a_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  PALLAS_ATTN_WGMMA_OF_ELEMENT("m64n64k16", PALLAS_ATTN_TEXT32, (PALLAS_ATTN_ACC32(d, 0)), "%34",
                               "%32, %33, p, 1, 1, 0, 0", "l"(a), "l"(b))
}

// d[64 x 256] += A[64 x 16] B[16 x 256]: A in registers, B MN-major.
template <typename Element>
__device__ __forceinline__ void wgmma_m64n256k16_a_registers(float (&d)[128], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  PALLAS_ATTN_WGMMA_OF_ELEMENT("m64n256k16", PALLAS_ATTN_TEXT128, (PALLAS_ATTN_ACC128(d)), "%133",
                               "{%128, %129, %130, %131}, %132, p, 1, 1, 1",
                               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
}

// d[64 x 256] += A[64 x 16] B[16 x 256]: A K-major in shared memory, B MN-major.
template <typename Element>
__device__ __forceinline__ void wgmma_m64n256k16_a_shared(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  PALLAS_ATTN_WGMMA_OF_ELEMENT("m64n256k16", PALLAS_ATTN_TEXT128, (PALLAS_ATTN_ACC128(d)), "%130",
                               "%128, %129, p, 1, 1, 0, 1", "l"(a), "l"(b))
}

#undef PALLAS_ATTN_UNPACK
#undef PALLAS_ATTN_WGMMA_OF_ELEMENT
#undef PALLAS_ATTN_WGMMA
#undef PALLAS_ATTN_TEXT128
#undef PALLAS_ATTN_TEXT32
#undef PALLAS_ATTN_ACC128
#undef PALLAS_ATTN_ACC32
#undef PALLAS_ATTN_ACC8
// clang-format on

}  // namespace pallas_attn::ptx
