// Numbers of one byte as the 16-bit operands of wgmma, which hold all of them exactly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/element_traits.h"
#include "sm90/e4m3.h"

namespace pallas_attn {
inline namespace sm90 {

template <typename Element>
__device__ __forceinline__ uint32_t pair_of_halves(__half2 pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const float2 v = __half22float2(pair);
    return ElementTraits<Element>::pack(v.x, v.y);
  }
}

template <typename Element>
__device__ __forceinline__ uint4 eight_of_e4m3(uint32_t low, uint32_t high) {
  const FourHalves first = halves_of(low), second = halves_of(high);
  return make_uint4(pair_of_halves<Element>(first.low), pair_of_halves<Element>(first.high),
                    pair_of_halves<Element>(second.low), pair_of_halves<Element>(second.high));
}

// Bytes 0 and 1, or 2 and 3. A byte becomes mantissa bits of a number whose last bit is 1: in fp16 of 1024
// and the byte, its sign turned; in bf16, whose mantissa has seven bits, of 128 and those, and the sign's 128
// goes by another.
template <typename Element>
__device__ __forceinline__ uint32_t pair_of_int8(uint32_t bytes, bool upper) {
  const uint32_t selector = upper ? 0x4342 : 0x4140;
  if constexpr (std::is_same_v<Element, __half>) {
    const uint32_t v = __byte_perm(bytes ^ 0x80808080, 0x64, selector);
    const __half2 shifted = __hsub2(reinterpret_cast<const __half2&>(v), __float2half2_rn(1152.0f));
    return reinterpret_cast<const uint32_t&>(shifted);
  } else {
    const uint32_t v = __byte_perm(bytes, 0x43, selector);
    const uint32_t magnitude = v & 0xff7fff7f, sign = v & 0xff80ff80;
    const __nv_bfloat162 exact = __hsub2(reinterpret_cast<const __nv_bfloat162&>(magnitude),
                                         reinterpret_cast<const __nv_bfloat162&>(sign));
    return reinterpret_cast<const uint32_t&>(exact);
  }
}

template <typename Element>
__device__ __forceinline__ uint4 eight_of_int8(uint32_t low, uint32_t high) {
  return make_uint4(pair_of_int8<Element>(low, false), pair_of_int8<Element>(low, true),
                    pair_of_int8<Element>(high, false), pair_of_int8<Element>(high, true));
}

// Times `scale` in float32, rounded once.
template <typename Element>
__device__ __forceinline__ void scale_eight(uint4& eight, float scale) {
  for (uint32_t* pair : {&eight.x, &eight.y, &eight.z, &eight.w}) {
    const float2 v = ElementTraits<Element>::unpack(*pair);
    *pair = ElementTraits<Element>::pack(v.x * scale, v.y * scale);
  }
}

}  // namespace sm90
}  // namespace pallas_attn
