// Small integer and float helpers.
#pragma once

#include "common/host_device.h"

namespace pallas_attn {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.442695040888963407f;

PALLAS_ATTN_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

#ifdef __CUDACC__
// 2^x by the special function unit alone; denormal results are zero. exp2f scales around them at the cost of
// branches.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

}  // namespace pallas_attn
