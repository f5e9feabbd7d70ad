// Numbers of e4m3 as bf16, the operands of wgmma.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/element_traits.h"

namespace pallas_attn {
inline namespace sm90 {

// Two of them, in the low 16 bits, times `scale` in float32, rounded once: what a conversion to float32, a
// product and a conversion to bf16 give. Every e4m3 is a half exactly, NaN included.
__device__ __forceinline__ uint32_t dequantize_pair(uint16_t pair, float scale) {
  __half2 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(reinterpret_cast<uint32_t&>(halves)) : "h"(pair));
  const float2 v = __half22float2(halves);
  return ElementTraits<__nv_bfloat16>::pack(v.x * scale, v.y * scale);
}

__device__ __forceinline__ uint4 dequantize_eight(uint32_t low, uint32_t high, float scale) {
  return make_uint4(dequantize_pair(low & 0xFFFF, scale), dequantize_pair(low >> 16, scale),
                    dequantize_pair(high & 0xFFFF, scale), dequantize_pair(high >> 16, scale));
}

}  // namespace sm90
}  // namespace pallas_attn
