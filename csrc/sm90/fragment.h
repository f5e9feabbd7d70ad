// The accumulators of a wgmma with 64 rows, as a thread sees them, and what they become.
//
// A warp has 16 of the rows. Register r of lane l is
//     row     l / 4 + 8 * (r / 2 % 2)
//     column  8 * (r / 4) + 2 * (l % 4) + r % 2,
// so a thread holds two rows, and the four lanes of a quad share them.
#pragma once

#include <cstdint>

#include "common/element_traits.h"

namespace pallas_attn {
inline namespace sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
constexpr int kFragmentRows = 64;
constexpr int kWarpRows = kFragmentRows / kWarpgroupWarps;
constexpr int kRowsPerThread = 2;
constexpr int kStepDims = 16;  // what one wgmma of 16-bit elements sums over

// Registers a thread of the warpgroup holds of so many columns.
constexpr int accumulators(int columns) { return kFragmentRows * columns / kWarpgroupThreads; }

// Which of the 64 rows and of the columns a thread holds.
struct FragmentPosition {
  int warp;     // in the warpgroup
  int quad;     // row in the 8-row group
  int in_quad;  // which two columns of 8

  __device__ explicit FragmentPosition(int thread)
      : warp(thread / 32), quad(thread % 32 / 4), in_quad(thread % 4) {}

  __device__ int row(int i) const { return warp * kWarpRows + i * 8 + quad; }
  // Register r of a fragment: its row (0 or 1) and its column.
  static __device__ constexpr int row_of(int r) { return r / 2 % 2; }
  static __device__ constexpr int columns_from_first(int r) { return r / 4 * 8 + r % 2; }
  __device__ int column(int r) const { return columns_from_first(r) + in_quad * 2; }
};

// Visits row i of a fragment by pairs of neighbouring columns: visit(column, left, right), where the thread's
// own pair is `in_quad * 2` further on.
template <int kCount, typename Visit>
__device__ __forceinline__ void visit_pairs(float (&d)[kCount], int i, Visit visit) {
#pragma unroll
  for (int group = 0; group < kCount / 4; ++group)
    visit(group * 8, d[group * 4 + i * 2], d[group * 4 + i * 2 + 1]);
}

template <int kCount, typename Visit>
__device__ __forceinline__ void visit_pairs(const float (&d)[kCount], int i, Visit visit) {
#pragma unroll
  for (int group = 0; group < kCount / 4; ++group)
    visit(group * 8, d[group * 4 + i * 2], d[group * 4 + i * 2 + 1]);
}

template <typename Op>
__device__ __forceinline__ float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffff, x, 1));
  return op(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Transposes a 4 x 4 of 32-bit words held by the four lanes of a quad: word j of lane i goes to word i of
// lane j.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&v)[4], int in_quad) {
  const bool odd = in_quad & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffff, odd ? v[0] : v[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffff, odd ? v[2] : v[3], 1);
  (odd ? v[0] : v[1]) = a;
  (odd ? v[2] : v[3]) = b;
  const bool high = in_quad & 2;
  const uint32_t c = __shfl_xor_sync(0xffffffff, high ? v[0] : v[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffff, high ? v[1] : v[3], 2);
  (high ? v[0] : v[2]) = c;
  (high ? v[1] : v[3]) = d;
}

// Accumulators of 16 columns, each row multiplied by its factor, as the A operand of the next product or the
// four matrices of a stmatrix: the layouts are the same.
template <typename Element, int kCount>
__device__ __forceinline__ void pack_step(const float (&d)[kCount], int step,
                                          const float (&factor)[kRowsPerThread], uint32_t (&packed)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = step * 8 + j * 2;
    const float scale = factor[FragmentPosition::row_of(r)];
    packed[j] = ElementTraits<Element>::pack(d[r] * scale, d[r + 1] * scale);
  }
}

// Of row i, times `factor`: a thread's accumulators are two columns out of every eight; after an exchange
// among the quad it has eight neighbours of columns [32 * group, 32 * (group + 1)), 16 bytes, those that are
// its number's.
template <typename Element, int kCount>
__device__ __forceinline__ uint4 neighbours(const float (&d)[kCount], int i, int group, float factor,
                                            int in_quad) {
  uint32_t v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = (group * 4 + j) * 4 + i * 2;
    v[j] = ElementTraits<Element>::pack(d[r] * factor, d[r + 1] * factor);
  }
  transpose_in_quad(v, in_quad);
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// What rounding to an element takes from a float: its next eight bits, signed
// (pallas_attn/_tile/low_bits.py).
template <typename Element>
__device__ __forceinline__ uint32_t lower_bits(float exact, float rounded) {
  constexpr int kShift = 23 - ElementTraits<Element>::kMantissaBits - 8;
  const int lost =
      (static_cast<int>(__float_as_uint(exact) - __float_as_uint(rounded)) + (1 << (kShift - 1))) >> kShift;
  return min(max(lost, -127), 127) & 0xff;
}

// Of two neighbours, a byte each.
template <typename Element>
__device__ __forceinline__ uint32_t lower_pair(float left, float right) {
  const float2 rounded = ElementTraits<Element>::unpack(ElementTraits<Element>::pack(left, right));
  return lower_bits<Element>(left, rounded.x) | lower_bits<Element>(right, rounded.y) << 8;
}

// Those of the eight elements that `neighbours` has, a byte each.
template <typename Element, int kCount>
__device__ __forceinline__ uint2 lower_neighbours(const float (&d)[kCount], int i, int group, float factor,
                                                  int in_quad) {
  uint32_t v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int r = (group * 4 + j) * 4 + i * 2;
    v[j] = lower_pair<Element>(d[r] * factor, d[r + 1] * factor);
  }
  transpose_in_quad(v, in_quad);
  return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}

}  // namespace sm90
}  // namespace pallas_attn
