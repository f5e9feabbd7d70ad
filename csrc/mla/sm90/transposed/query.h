// The query's tile: from device memory to where products read it. Latent dimensions become halves, which have
// three bits more than bf16 but a small range, so that each row is multiplied by a power of two of its own.
#pragma once

#include "common/element_traits.h"
#include "common/math.h"
#include "mla/sm90/dense/store.h"
#include "mla/sm90/transposed/layout.h"
#include "mla/sm90/transposed/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90::transposed {

// Where this CTA's rows and results belong.
__device__ __forceinline__ OutputPlace place_of_block(int owner) {
  return {ptx::block_z(), ptx::block_x(), static_cast<Half>(owner)};
}

// Into the L2, by a warp that knows a run before the math warpgroups come to it and load its query
// themselves.
template <int kRows>
__device__ __forceinline__ void prefetch_query(const DecodeParams& params, const OutputPlace& place,
                                               int request, int lane) {
  const int rows = min(kRows, place.rows_left(params));
  const char* tile = static_cast<const char*>(params.query) + place.row(params, request) * kQueryDim * 2;
  if (lane == 0) ptx::bulk_prefetch(tile, rows * kQueryDim * 2);
}

// The largest number of a row becomes at least 2^15 and less than 2^16, which halves can hold of what bf16
// can.
constexpr uint32_t kTopExponent = 15 + 127;
// Below, the factor would be no normal number.
constexpr uint32_t kLeastExponent = 16;

// Both of a word's two numbers times a power of two.
template <typename Element>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float factor) {
  return ElementTraits<Element>::pack(__uint_as_float(pair << 16) * factor,
                                      __uint_as_float(pair & 0xFFFF0000) * factor);
}

// By the warps of both math warpgroups: four rows a warp at once, so that what is stored together falls into
// different banks; all that a warp has are loaded before the first is looked at. What lies behind the last
// row becomes zero.
template <typename Plan>
__device__ __forceinline__ void load_query(const DecodeParams& params, Plan& smem, const OutputPlace& place,
                                           int request, float scale_log2, int warp, int lane) {
  constexpr int kRowsAtOnce = 4, kAllRows = kRowsAtOnce * kOwners * kWarpgroupWarps;
  constexpr int kRounds = ceil_div(Plan::kRows, kAllRows);
  if (warp * kRowsAtOnce >= Plan::kRows) return;
  const int word = lane % 8 / 2, upper = lane % 2;
  const int first = warp * kRowsAtOnce + lane / 8, rows_left = place.rows_left(params);
  const char* tile = static_cast<const char*>(params.query) + place.row(params, request) * kQueryDim * 2;
  uint4 loaded[kRounds][kPieces];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kAllRows;
    const char* from = tile + static_cast<int64_t>(row) * kQueryDim * 2;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      loaded[round][piece] = make_uint4(0, 0, 0, 0);
      if (row < rows_left) {
        loaded[round][piece] = ptx::load_16_bytes(from + query_dim(piece, upper * 4, word) * 2);
      }
    }
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kAllRows;
    uint32_t pairs[kPieces][4];
    uint32_t peak = 0;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint4 v = loaded[round][piece];
      pairs[piece][0] = v.x, pairs[piece][1] = v.y, pairs[piece][2] = v.z, pairs[piece][3] = v.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        peak = max(peak, max(pairs[piece][j] << 17 >> 17, pairs[piece][j] << 1 >> 17));
      }
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      peak = max(peak, __shfl_xor_sync(0xffffffff, peak, distance));
    }
    // Of NaN and infinity nothing finite comes, whatever the factor.
    uint32_t exponent = max(peak >> 7, kLeastExponent);
    if (exponent == 255) exponent = kTopExponent;
    const float factor = __uint_as_float((127 + kTopExponent - exponent) << 23);
    if (lane % 8 == 0) {
      smem.row_factor[row] = __uint_as_float((127 - kTopExponent + exponent) << 23) * scale_log2;
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint32_t to = ptx::shared_address(smem.query[piece][row]) + word * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t chunk = (upper * 4 + j) ^ (row & 7);
        const uint32_t pair = pairs[piece][j];
        ptx::store_word(to + chunk * 16, piece < kLatentPieces ? scaled_pair<__half>(pair, factor)
                                                               : scaled_pair<__nv_bfloat16>(pair, factor));
      }
    }
  }
}

}  // namespace pallas_attn::mla::sm90::transposed
