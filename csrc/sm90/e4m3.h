// Numbers of e4m3 as bf16, the operands of wgmma.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/element_traits.h"

namespace pallas_attn {
inline namespace sm90 {

// Two halves, times `scale` in float32, rounded once.
__device__ __forceinline__ uint32_t scale_pair(__half2 halves, float scale) {
  const float2 v = __half22float2(halves);
  return ElementTraits<__nv_bfloat16>::pack(v.x * scale, v.y * scale);
}

// Four numbers, times `scale`: what a conversion to float32, a product and a conversion to bf16 give. Every
// e4m3 is a half exactly, NaN included. The word is taken apart in PTX, where ptxas sees that an operand is a
// word's upper half, and needs no shift.
__device__ __forceinline__ uint2 dequantize_four(uint32_t bytes, float scale) {
  __half2 low, high;
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}\n"
      : "=r"(reinterpret_cast<uint32_t&>(low)), "=r"(reinterpret_cast<uint32_t&>(high))
      : "r"(bytes));
  return make_uint2(scale_pair(low, scale), scale_pair(high, scale));
}

__device__ __forceinline__ uint4 dequantize_eight(uint32_t low, uint32_t high, float scale) {
  const uint2 first = dequantize_four(low, scale), second = dequantize_four(high, scale);
  return make_uint4(first.x, first.y, second.x, second.y);
}

}  // namespace sm90
}  // namespace pallas_attn
