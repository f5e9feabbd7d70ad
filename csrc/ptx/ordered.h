// Global memory through which CTAs of one kernel tell each other.
#pragma once

#include <cstdint>

namespace pallas_attn::ptx {

// What the thread that stored it, and those it had met at a barrier, did before is seen behind this.
__device__ __forceinline__ int load_acquire(const int* from) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(int* to, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

// Adds in the L2; nothing comes back.
__device__ __forceinline__ void add_in_memory(float* to, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void add_in_memory(float2* to, float2 v) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ void add_in_memory(float4* to, float4 v) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

}  // namespace pallas_attn::ptx
