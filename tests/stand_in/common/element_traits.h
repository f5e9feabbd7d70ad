#pragma once

#include <cuda.h>

#include "device.h"

namespace pallas_attn {

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}

inline float log2_fast(float x) { return std::log2(x); }

template <typename Element>
struct ElementTraits;

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  static constexpr int kMantissaBits = 7;
  static uint32_t pack(float low, float high) {
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(low)).x |
           static_cast<uint32_t>(static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(high)).x) << 16;
  }
  static float2 unpack(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
  }
};

template <>
struct ElementTraits<__half> {
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static constexpr int kMantissaBits = 10;
  static uint32_t pack(float low, float high) {
    return static_cast<__half_raw>(__float2half_rn(low)).x |
           static_cast<uint32_t>(static_cast<__half_raw>(__float2half_rn(high)).x) << 16;
  }
  static float2 unpack(uint32_t packed) {
    const __half_raw low = {static_cast<uint16_t>(packed)}, high = {static_cast<uint16_t>(packed >> 16)};
    return {__half2float(__half(low)), __half2float(__half(high))};
  }
};

}  // namespace pallas_attn
