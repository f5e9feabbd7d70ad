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

}  // namespace pallas_attn::ptx
