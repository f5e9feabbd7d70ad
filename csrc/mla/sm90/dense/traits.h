// What differs between instantiations.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pallas_attn::mla::sm90 {

// kClusterSize 2: two CTAs working on the same tokens for different rows load each page once, half each, and multicast.
template <typename Element_, int kClusterSize_>
struct DecodeTraits {
  using Element = Element_;
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr bool kMulticast = kClusterSize > 1;
  static_assert(kClusterSize == 1 || kClusterSize == 2);
};

template <typename Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace pallas_attn::mla::sm90
