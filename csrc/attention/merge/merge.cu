// out = sum_i w_i out_i / sum_i w_i over the parts i of a row, w_i = 2^maximum_i total_i; a sink joins the
// sum without a value. One warp a row; a sum has one order.
#include <cmath>

#include "attention/merge/merge.h"
#include "attention/row_result.h"
#include "attention/rules.h"
#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kPairs = 256 / 64;  // of columns, that a lane adds up

template <typename Element>
__device__ void merge_row(const ForwardParams& params, const SplitTile& tile, const Sequence& seq,
                          int tile_rows, int kv_head, int row, int lane) {
  const int group = params.group;
  const int head = kv_head * group + row % group;
  const auto row_of = [&](int part) {
    return ((tile.first_partial + int64_t{part}) * params.num_kv_heads + kv_head) * tile_rows + row;
  };
  RowLse lse = {-INFINITY, 0.0f};
  if (lane < tile.splits) {
    const float2 loaded = __ldcg(reinterpret_cast<const float2*>(params.partial_lse + row_of(lane)));
    lse = {loaded.x, loaded.y};
  }
  float top = lse.maximum;
  for (int distance = 16; distance > 0; distance /= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
  }
  const float sink2 = params.sinks == nullptr ? -INFINITY : __ldg(params.sinks + head) * kLog2E;
  const float keys = top;
  top = fmaxf(top, sink2);
  const float base = top == -INFINITY ? 0.0f : top;
  const float weight = exp2f(lse.maximum - base) * lse.total;
  float sum = weight;
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  sum += exp2f(sink2 - base);

  float2 v[kPairs] = {};
  for (int part = 0; part < tile.splits; ++part) {
    const float share = __shfl_sync(~0u, weight, part);
    const float* from = params.partial_out + row_of(part) * params.value_dim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int column = i * 64 + lane * 2;
      if (column >= params.value_dim) continue;
      const float2 pair = __ldcg(reinterpret_cast<const float2*>(from + column));
      v[i].x = fmaf(share, pair.x, v[i].x);
      v[i].y = fmaf(share, pair.y, v[i].y);
    }
  }
  const int64_t token = seq.q_begin + tile.token + row / group;
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int64_t place = seq.batch * params.out_strides.batch + token * params.out_strides.token +
                        head * params.out_strides.head;
  auto* out = static_cast<uint16_t*>(params.out) + place;
  auto* low = static_cast<uint8_t*>(params.low);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = i * 64 + lane * 2;
    if (column >= params.value_dim) continue;
    const float left = v[i].x * factor, right = v[i].y * factor;
    *reinterpret_cast<uint32_t*>(out + column) = ElementTraits<Element>::pack(left, right);
    if (low != nullptr) {
      *reinterpret_cast<uint16_t*>(low + place + column) =
          static_cast<uint16_t>(lower_pair<Element>(left, right));
    }
  }
  if (lane == 0) {
    const int64_t lse_place = seq.batch * params.lse_strides.batch + token * params.lse_strides.token +
                              head * params.lse_strides.head;
    const RowLse all = {base, sum};
    if (params.rest != nullptr) {
      store_parts(params, keys, all, lse_place);
    } else {
      params.lse[lse_place] = log_sum_exp(params, all);
    }
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ ForwardParams params, int tile_rows) {
  ptx::wait_for_previous_kernel();
  const int num_seqs = num_seqs_now(params);
  const int group = params.group;
  const int units = __ldcg(&params.counters->split_tiles) * params.num_kv_heads * tile_rows;
  for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < units; unit += gridDim.x * kWarps) {
    const int row = unit % tile_rows, of_heads = unit / tile_rows;
    const SplitTile& from = params.split_tiles[of_heads / params.num_kv_heads];
    const int4 low = __ldcg(reinterpret_cast<const int4*>(&from));
    const SplitTile tile = {low.x, low.y, low.z, low.w, __ldcg(&from.splits)};
    if (row >= tile.tokens * group) continue;
    const Sequence seq(params, tile.seq, num_seqs);
    const int64_t token = int64_t{seq.batch} * params.q_len + seq.q_begin + tile.token + row / group;
    if (seq.q_mixed && __ldg(params.q_ranks + token) != seq.rank) continue;
    merge_row<Element>(params, tile, seq, tile_rows, of_heads % params.num_kv_heads, row, threadIdx.x % 32);
  }
}

}  // namespace

LaunchStatus launch_merge(const ForwardParams& params, int tile_rows, int ctas, cudaStream_t stream) {
  const auto kernel =
      params.element == ElementType::kBfloat16 ? merge_kernel<__nv_bfloat16> : merge_kernel<__half>;
  return launch_dependent(kernel, dim3(2 * ctas), kThreads, 0, stream, Blocks::kIndependent,
                          "launching the merge", params, tile_rows);
}

}  // namespace pallas_attn::attention
