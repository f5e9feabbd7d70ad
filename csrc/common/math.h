// Small integer and float helpers shared by host and device code.
#pragma once

#include <cuda_runtime.h>

namespace pallas_attn {

constexpr float kLn2 = 0.693147180559945309f;
constexpr float kLog2E = 1.442695040888963407f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace pallas_attn
