// Small integer and float helpers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace pallas_attn {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.442695040888963407f;

PALLAS_ATTN_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// As std::max and std::min, for device code too.
template <typename T>
PALLAS_ATTN_HOST_DEVICE constexpr T at_least(T low, T x) {
  return x < low ? low : x;
}
template <typename T>
PALLAS_ATTN_HOST_DEVICE constexpr T at_most(T high, T x) {
  return x > high ? high : x;
}

PALLAS_ATTN_HOST_DEVICE inline int count_bits(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

// Of `count` ascending numbers, the first of which is not above `most`: the place of the last one that is
// not.
PALLAS_ATTN_HOST_DEVICE inline int last_up_to(const int* ascending, int count, int most) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (ascending[middle] <= most ? low : high) = middle;
  }
  return low;
}

// Of a word that has one: the highest bit that is set.
PALLAS_ATTN_HOST_DEVICE inline int highest_bit(uint32_t word) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(word);
#else
  return 31 - __builtin_clz(word);
#endif
}

// Divides numbers below 2^31 by the same one again and again: a product and a correction each.
class Divisor {
 public:
  PALLAS_ATTN_HOST_DEVICE explicit Divisor(uint32_t divisor) : Divisor(divisor, 0xFFFFFFFFu / divisor) {}

  // The same for quotients below 2^14, made without a division.
  PALLAS_ATTN_HOST_DEVICE static Divisor of_small_quotients(uint32_t divisor) {
    // 2^32 less 2^-20 of itself, which is more than is lost by rounding: the reciprocal is never too large,
    // and the product, less than 2^14 x 2^-19 + 1/2 too small, is so by less than 1.
    constexpr float kAlmost = 4294963200.0f;
#ifdef __CUDA_ARCH__
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(static_cast<float>(divisor)));
#else
    const float reciprocal = 1.0f / static_cast<float>(divisor);
#endif
    return {divisor, static_cast<uint32_t>(kAlmost * reciprocal)};
  }

  PALLAS_ATTN_HOST_DEVICE uint32_t into(uint32_t dividend) const {
    // The reciprocal is less than 2^32 / divisor by at most 1, so the product too small by at most 1/2.
    const auto quotient = static_cast<uint32_t>(uint64_t{dividend} * reciprocal_ >> 32);
    return quotient + (dividend - quotient * divisor_ >= divisor_);
  }
  // Rounded up; dividend + divisor, too, must be below 2^31.
  PALLAS_ATTN_HOST_DEVICE uint32_t into_up(uint32_t dividend) const { return into(dividend + divisor_ - 1); }

  PALLAS_ATTN_HOST_DEVICE uint32_t reciprocal() const { return reciprocal_; }

 private:
  PALLAS_ATTN_HOST_DEVICE Divisor(uint32_t divisor, uint32_t reciprocal)
      : divisor_(divisor), reciprocal_(reciprocal) {}

  uint32_t divisor_, reciprocal_;
};

#ifdef __CUDACC__
// 2^x by the special function unit alone; denormal results are zero. exp2f scales around them at the cost of
// branches.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The logarithm, exact to 2^-22.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

}  // namespace pallas_attn
