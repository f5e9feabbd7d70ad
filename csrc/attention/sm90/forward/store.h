// What a tile's rows come to, from a math warpgroup's registers to memory.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/row_result.h"
#include "attention/sm90/forward/documents.h"
#include "attention/sm90/forward/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/control.h"
#include "sm90/fragment.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::attention::sm90 {

// Part of a tile's keys: float32, for the merge.
template <typename Shape, int kCount>
__device__ __forceinline__ void store_partial(const ForwardParams& params, const Tile& tile,
                                              const float (&rO)[kCount], const RowEnds& ends, int first_row,
                                              const FragmentPosition& at) {
  const int64_t tile_row = (int64_t{tile.partial} * params.num_kv_heads + tile.kv_head) * Shape::kRows;
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

// Of row i, packed in pairs by `packed(left, right)`: a thread sends one of its own two pairs of 16 columns
// to the lane beside it, and is sent one. An even lane then has four neighbours of the first eight columns,
// an odd one of the last: write(step, them). Some steps at a time: one by one, each exchange would be waited
// for.
template <int kSteps, int kCount, typename Pack, typename Write>
__device__ __forceinline__ void exchange_pairs(const float (&d)[kCount], int i, int first, bool odd,
                                               Pack packed, Write write) {
  uint32_t kept[kSteps], got[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (first + j >= kCount / 8) break;
    const int r = (first + j) * 8 + i * 2;
    const uint32_t left = packed(d[r], d[r + 1]), right = packed(d[r + 4], d[r + 5]);
    kept[j] = odd ? right : left;
    got[j] = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (first + j >= kCount / 8) break;
    write(first + j, make_uint2(odd ? got[j] : kept[j], odd ? kept[j] : got[j]));
  }
}

// A quad writes 32 bytes of a row at a time: with one exchange, little code and few steps that wait for each
// other. Short tiles are stored as often as they are computed.
template <typename Element, Form kForm, int kCount>
__device__ __forceinline__ void store_rows(const ForwardParams& params, const Tile& tile,
                                           const float (&rO)[kCount], const RowEnds& ends, const Group& group,
                                           int first_row, const FragmentPosition& at) {
  using Traits = ElementTraits<Element>;
  const bool odd = at.in_quad & 1;
  const int column = at.in_quad * 2 + (odd ? 6 : 0);
  const int first_head = tile.kv_head * group.size;
  const int64_t tile_place = tile.batch * params.out_strides.batch + tile.token * params.out_strides.token +
                             first_head * params.out_strides.head + column;
  const int64_t tile_lse = tile.batch * params.lse_strides.batch + tile.token * params.lse_strides.token +
                           first_head * params.lse_strides.head;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = first_row + at.row(i);
    const bool answered = is_answered<kForm>(params, tile, group, row);
    const int query = group.query_of(row), head = row - query * group.size;
    float factor = ends.factor[i];
    RowLse lse = ends.lse[i];
    if (params.sinks != nullptr) {
      const float sink = __ldg(params.sinks + first_head + head);
      factor *= share_beside_sink(lse, sink);
      lse = beside_sink(lse, sink);
    }
    const int64_t place = tile_place + query * params.out_strides.token + head * params.out_strides.head;
    auto* const out = ptx::another(static_cast<uint16_t*>(params.out) + place);
    const int columns = answered ? params.value_dim - column : 0;  // from the thread's first on
    const auto round = [&](float left, float right) { return Traits::pack(left * factor, right * factor); };
    const auto write = [&](int step, uint2 v) {
      if (step * 16 < columns) ptx::store_past_l1(out + step * 16, v);
    };
    if (kForm != Form::kFull || params.low == nullptr) {
#pragma unroll
      for (int step = 0; step < kCount / 8; step += 4) exchange_pairs<4>(rO, i, step, odd, round, write);
    } else {
      auto* const low = static_cast<uint8_t*>(params.low) + place;
#pragma unroll
      for (int step = 0; step < kCount / 8; ++step) {
        exchange_pairs<1>(rO, i, step, odd, round, write);
        // Products with it are made again, and take no registers.
        const float again = ptx::another(factor);
        exchange_pairs<1>(
            rO, i, step, odd,
            [&](float left, float right) { return lower_pair<Element>(left * again, right * again); },
            [&](int step, uint2 v) {
              if (step * 16 < columns) *reinterpret_cast<uint32_t*>(low + step * 16) = v.x | v.y << 16;
            });
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

// A math warpgroup's rows, whose logits in base 2 are scores times `factor`; `scale` is of the values.
template <typename Element, typename Shape, Form kForm, int kCount>
__device__ __forceinline__ void store_tile(const ForwardParams& params, const Tile& tile,
                                           const float (&rO)[kCount], RowState state, float factor,
                                           float scale, const Group& group, int first_row,
                                           const FragmentPosition& at) {
#pragma unroll
  for (float& sum : state.sum) sum = quad_reduce(sum, [](float a, float b) { return a + b; });
  RowEnds ends(state, factor);
#pragma unroll
  for (float& each : ends.factor) each *= scale;
  if (tile.partial >= 0) {
    store_partial<Shape>(params, tile, rO, ends, first_row, at);
  } else {
    store_rows<Element, kForm>(params, tile, rO, ends, group, first_row, at);
  }
}

}  // namespace pallas_attn::attention::sm90
