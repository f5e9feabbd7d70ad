// Numbers of e4m3 as halves and as bf16, the operands of wgmma.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/element_traits.h"

namespace pallas_attn {
inline namespace sm90 {

// Four numbers as halves, which every e4m3 is exactly, NaN included. The word is taken apart in PTX, where
// ptxas sees that an operand is a word's upper half, and needs no shift.
struct FourHalves {
  __half2 low, high;
};
__device__ __forceinline__ FourHalves halves_of(uint32_t bytes) {
  FourHalves halves;
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}\n"
      : "=r"(reinterpret_cast<uint32_t&>(halves.low)), "=r"(reinterpret_cast<uint32_t&>(halves.high))
      : "r"(bytes));
  return halves;
}

// Two halves, times `scale` in float32, rounded once.
__device__ __forceinline__ uint32_t scale_pair(__half2 halves, float scale) {
  const float2 v = __half22float2(halves);
  return ElementTraits<__nv_bfloat16>::pack(v.x * scale, v.y * scale);
}

// Eight numbers, times `scale`: what a conversion to float32, a product and a conversion to bf16 give.
__device__ __forceinline__ uint4 dequantize_eight(uint32_t low, uint32_t high, float scale) {
  const FourHalves first = halves_of(low), second = halves_of(high);
  return make_uint4(scale_pair(first.low, scale), scale_pair(first.high, scale),
                    scale_pair(second.low, scale), scale_pair(second.high, scale));
}

}  // namespace sm90
}  // namespace pallas_attn
