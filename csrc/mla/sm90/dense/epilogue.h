// Writing a tile's result: final for requests of one split, float32 partials otherwise.
#pragma once

#include "common/math.h"
#include "mla/sm90/dense/softmax.h"
#include "mla/sm90/dense/tile_walker.h"

namespace pallas_attn::mla::sm90 {

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

// A thread's accumulators are two columns out of every eight; after the exchange it has eight neighbours, one
// 16-byte store, and a quad writes 64 bytes of a row.
template <typename Element>
__device__ __forceinline__ void store_final(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                            const float (&factor)[kRowsPerThread], char* tile_out, int side,
                                            int rows_left) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    char* row_out = tile_out + static_cast<int64_t>(row) * kLatentDim * 2 + side * kHalfDims * 2;
#pragma unroll
    for (int group = 0; group < kHalfDims / 32; ++group) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = (group * 4 + j) * 4 + i * 2;
        v[j] = ElementTraits<Element>::pack(rO[r] * factor[i], rO[r + 1] * factor[i]);
      }
      transpose_in_quad(v, at.in_quad);
      if (row < rows_left) {
        *reinterpret_cast<uint4*>(row_out + group * 64 + at.in_quad * 16) =
            make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

// Two columns of a quad's lanes make one 32-byte sector of float32 as they are.
__device__ __forceinline__ void store_partial(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                              const float (&factor)[kRowsPerThread], float* tile_out,
                                              int side, int rows_left) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= rows_left) continue;
    float* row_out = tile_out + static_cast<int64_t>(row) * kLatentDim + side * kHalfDims + at.in_quad * 2;
#pragma unroll
    for (int group = 0; group < kHalfDims / 8; ++group) {
      const int r = group * 4 + i * 2;
      *reinterpret_cast<float2*>(row_out + group * 8) = make_float2(rO[r] * factor[i], rO[r + 1] * factor[i]);
    }
  }
}

// `sum` holds the rows' complete sums, zero where nothing was visible.
template <typename Element>
__device__ __forceinline__ void store_tile(const DecodeParams& params, const SplitTile& tile, int kv_head,
                                           int row_tile, int side, const FragmentPosition& at,
                                           const float (&rO)[kOutRegisters],
                                           const float (&maximum)[kRowsPerThread],
                                           const float (&sum)[kRowsPerThread]) {
  const int rows = params.rows();
  const int first_row = row_tile * kTileRows;
  const int rows_left = rows - first_row;

  float factor[kRowsPerThread];
  float lse2[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const bool empty = sum[i] == 0.0f;  // false for NaN, which must survive
    factor[i] = empty ? 0.0f : 1.0f / sum[i];
    lse2[i] = empty ? -INFINITY : maximum[i] + log2f(sum[i]);
  }

  const bool whole = tile.partial_slot < 0;
  const int64_t slot = whole ? tile.request : tile.partial_slot;
  const int64_t slot_row = (slot * params.num_kv_heads + kv_head) * rows + first_row;
  if (whole) {
    const int64_t offset = slot_row * kLatentDim * 2;
    store_final<Element>(rO, at, factor, static_cast<char*>(params.out) + offset, side, rows_left);
  } else {
    store_partial(rO, at, factor, params.partial_out + slot_row * kLatentDim, side, rows_left);
  }

  if (side != 0 || at.in_quad != 0) return;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    if (at.row(i) >= rows_left) continue;
    if (whole) {
      *params.lse_of(tile.request, kv_head, first_row + at.row(i)) = lse2[i] * kLn2;
    } else {
      params.partial_lse2[slot_row + at.row(i)] = lse2[i];
    }
  }
}

}  // namespace pallas_attn::mla::sm90
