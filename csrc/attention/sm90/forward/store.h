// What a tile's rows come to, from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "sm90/fragment.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::attention::sm90 {

// Part of a tile's keys: float32, for the merge.
template <typename Shape, int kCount>
__device__ __forceinline__ void store_partial(const ForwardParams& params, const Tile& tile,
                                              const float (&rO)[kCount], const RowEnds& ends, int first_row,
                                              const FragmentPosition& at) {
  const int64_t tile_row = (int64_t{tile.slot} * params.num_kv_heads + tile.kv_head) * Shape::kRows;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int64_t row = tile_row + first_row + at.row(i);
    float* out = params.partial_out + row * params.value_dim;
    visit_pairs(rO, i, [&](int column, float left, float right) {
      column += at.in_quad * 2;
      if (column < params.value_dim) {
        *reinterpret_cast<float2*>(out + column) = make_float2(left * ends.factor[i], right * ends.factor[i]);
      }
    });
    if (at.in_quad == 0) params.partial_lse[row] = ends.lse[i];
  }
}

// A quad writes 64 bytes of a row at a time.
template <typename Element, int kCount>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Tile& tile,
                                           const float (&rO)[kCount], const RowEnds& ends, int group,
                                           int first_row, const FragmentPosition& at) {
  const int chunks = params.value_dim / 8;  // of a row, 16 bytes each
  const int first_head = tile.kv_head * group;
  auto* const tile_out = static_cast<uint16_t*>(params.out) + tile.batch * params.out_strides.batch +
                         tile.token * params.out_strides.token + first_head * params.out_strides.head;
  float* const tile_lse = params.lse + tile.batch * params.lse_strides.batch +
                          tile.token * params.lse_strides.token + first_head * params.lse_strides.head;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = first_row + at.row(i);
    const bool answered = row < tile.tokens * group;
    const int query = row / group, head = row - query * group;
    float factor = ends.factor[i];
    RowLse row_lse = ends.lse[i];
    if (params.sinks != nullptr) {
      const float sink = __ldg(params.sinks + first_head + head);
      factor *= share_beside_sink(row_lse, sink);
      row_lse = beside_sink(row_lse, sink);
    }
    uint4* out = reinterpret_cast<uint4*>(tile_out + query * params.out_strides.token +
                                          head * params.out_strides.head);
#pragma unroll
    for (int part = 0; part < kCount / 16; ++part) {
      const uint4 v = neighbours<Element>(rO, i, part, factor, at.in_quad);
      const int chunk = part * 4 + at.in_quad;
      if (answered && chunk < chunks) out[chunk] = v;
    }
    if (answered && at.in_quad == 0) {
      tile_lse[query * params.lse_strides.token + head * params.lse_strides.head] =
          params.base2_lse ? log2_of(row_lse) : log2_of(row_lse) * kLn2;
    }
  }
}

}  // namespace pallas_attn::attention::sm90
