// What depends on the element type.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace pallas_attn {

template <typename Element>
struct ElementTraits;

template <>
struct ElementTraits<__nv_bfloat16> {
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  static constexpr int kMantissaBits = 7;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
  }
};

template <>
struct ElementTraits<__half> {
  static constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  static constexpr int kMantissaBits = 10;

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t packed) {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
};

}  // namespace pallas_attn
