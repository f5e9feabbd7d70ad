// What stays in the L2, and for how long.
#pragma once

#include <cstdint>

namespace pallas_attn::ptx {

// Cache policies are opaque 64-bit words that the hardware can also create itself; asking for them at run
// time keeps undocumented constants out of this file.
__device__ __forceinline__ uint64_t l2_evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Whatever was said of a line before.
__device__ __forceinline__ uint64_t l2_evict_unchanged_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t l2_evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_with_policy(float* destination, float2 v, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(destination), "f"(v.x), "f"(v.y),
               "l"(policy)
               : "memory");
}

__device__ __forceinline__ void store_with_policy(void* destination, uint4 v, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(destination), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

// Leaves the L1 to what threads have no registers for.
__device__ __forceinline__ void store_past_l1(void* destination, uint2 v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(destination), "r"(v.x), "r"(v.y)
               : "memory");
}

// What nobody writes while the kernel runs, past the L1. Volatile, so that loads stay where they stand: far
// ahead of what uses them.
__device__ __forceinline__ uint4 load_16_bytes(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}
__device__ __forceinline__ uint2 load_8_bytes(const void* source) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source));
  return v;
}
__device__ __forceinline__ float load_float(const void* source) {
  float v;
  asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(source));
  return v;
}

__device__ __forceinline__ int load_int(const int* source) {
  int v;
  asm volatile("ld.global.nc.L1::no_allocate.s32 %0, [%1];" : "=r"(v) : "l"(source));
  return v;
}

// Adds one; what was there before. By itself: atomicAdd becomes one for all threads of the warp that call it,
// and a shuffle that waits for the answer.
__device__ __forceinline__ int fetch_and_increment(int* counter) {
  int before;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Brings the line of an address into the L2.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Nobody will read this line of 128 bytes any more: it need not be written back to memory. Whoever has read
// it must have met this thread at a barrier.
constexpr int kLineBytes = 128;
__device__ __forceinline__ void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

}  // namespace pallas_attn::ptx
