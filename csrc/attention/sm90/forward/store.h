// What a tile's rows come to, from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/row_result.h"
#include "attention/sm90/forward/documents.h"
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
template <typename Element, Form kForm, int kCount>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Tile& tile,
                                           const float (&rO)[kCount], const RowEnds& ends, int group,
                                           int first_row, const FragmentPosition& at) {
  const int chunks = params.value_dim / 8;  // of a row, 16 bytes each
  const int first_head = tile.kv_head * group;
  const int64_t tile_place = tile.batch * params.out_strides.batch + tile.token * params.out_strides.token +
                             first_head * params.out_strides.head;
  auto* const tile_out = static_cast<uint16_t*>(params.out) + tile_place;
  const int64_t tile_lse = tile.batch * params.lse_strides.batch + tile.token * params.lse_strides.token +
                           first_head * params.lse_strides.head;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = first_row + at.row(i);
    const bool answered = is_answered<kForm>(params, tile, group, row);
    const int query = row / group, head = row - query * group;
    float factor = ends.factor[i];
    RowLse lse = ends.lse[i];
    if (params.sinks != nullptr) {
      const float sink = __ldg(params.sinks + first_head + head);
      factor *= share_beside_sink(lse, sink);
      lse = beside_sink(lse, sink);
    }
    const int64_t place = query * params.out_strides.token + head * params.out_strides.head;
    uint4* out = reinterpret_cast<uint4*>(tile_out + place);
#pragma unroll
    for (int part = 0; part < kCount / 16; ++part) {
      const uint4 v = neighbours<Element>(rO, i, part, factor, at.in_quad);
      const int chunk = part * 4 + at.in_quad;
      if (answered && chunk < chunks) out[chunk] = v;
      if (kForm == Form::kFull && params.low != nullptr) {
        // Another factor for all the compiler knows: products with it are made again, and take no registers.
        float again = factor;
        asm volatile("" : "+f"(again));
        const uint2 bits = lower_neighbours<Element>(rO, i, part, again, at.in_quad);
        auto* low = reinterpret_cast<uint2*>(static_cast<uint8_t*>(params.low) + tile_place + place);
        if (answered && chunk < chunks) low[chunk] = bits;
      }
    }
    if (answered && at.in_quad == 0) {
      const int64_t lse_place = tile_lse + query * params.lse_strides.token + head * params.lse_strides.head;
      if (kForm == Form::kFull && params.rest != nullptr) {
        store_parts(params, ends.lse[i].maximum, lse, lse_place);
      } else {
        params.lse[lse_place] = log_sum_exp(params, lse);
      }
    }
  }
}

}  // namespace pallas_attn::attention::sm90
