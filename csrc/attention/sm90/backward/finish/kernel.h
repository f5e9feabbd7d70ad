// Sums in float32 become gradients of queries, in 16 bits: a warp for some neighbouring queries of a head.
// Queries that see no key are answered here, too.
//
// What rounding made of the sum over keys of gradients of scores, times what keys have in common, is taken
// back (pallas_attn/_tile/weights.py): the mean of some keys stands for that. Not of capped scores, whose sum
// is not known.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/config.h"
#include "attention/sm90/backward/document.h"
#include "attention/sm90/backward/finish/finish.h"
#include "attention/sm90/backward/mean.h"
#include "attention/sm90/backward/walk.h"
#include "common/element_traits.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90::backward {

constexpr int kFinishWarps = 8, kFinishRows = 32;
constexpr int kFinishAhead = 4;  // rows loaded

template <typename Element>
class Finisher {
 public:
  // Of unit `unit`: so many rows of a head.
  __device__ Finisher(const BackwardParams& params, int dim, int64_t unit, int lane)
      : params_(params), column_(lane * kMeanColumns), sum_columns_(dim + kCountColumns) {
    const int of_head = ceil_div(params.q_len, kFinishRows);
    const int64_t row = unit / of_head;
    first_ = static_cast<int>(unit - row * of_head) * kFinishRows;
    batch_ = static_cast<int>(row / params.num_heads);
    head_ = static_cast<int>(row - int64_t{batch_} * params.num_heads);
    row_ = row * params.q_len;
    works_ = column_ < params.head_dim;
  }

  __device__ void work() {
    const int end = min(first_ + kFinishRows, params_.q_len);
    for (int token = first_; token < end; token += kFinishAhead) {
      float4 sum[kFinishAhead], counts[kFinishAhead][2];
      float total[kFinishAhead];
#pragma unroll
      for (int i = 0; i < kFinishAhead; ++i) {
        const int64_t row = row_ + min(token + i, end - 1);
        const float* sums = params_.sums + row * sum_columns_;
        const float* counted = sums + sum_columns_ - kCountColumns;
        sum[i] = works_ ? __ldcg(reinterpret_cast<const float4*>(sums + column_)) : float4{};
        for (int j = 0; j < 2; ++j) counts[i][j] = __ldcg(reinterpret_cast<const float4*>(counted) + j);
        total[i] = __ldg(params_.total + row);
      }
#pragma unroll
      for (int i = 0; i < kFinishAhead; ++i) {
        if (token + i >= end) break;
        const float4 a = counts[i][0], b = counts[i][1];
        store(token + i, end, sum[i], a.x + a.y + a.z + a.w + (b.x + b.y + b.z + b.w) - total[i]);
      }
    }
  }

 private:
  __device__ void store(int token, int end, float4 sum, float excess) {
    open(token);
    const int query = token - query_;
    const Span seen = band_.keys_of(query, query);
    uint2 words = make_uint2(0, 0);
    if (seen.begin < seen.end) {
      if (!sampled_) take_mean(query, min(end - query_, band_.q_len) - 1);
      if (params_.softcap > 0.0f) excess = 0.0f;
      const float scale = params_.scale;
      words.x = ElementTraits<Element>::pack(fmaf(-excess, mean_.x, sum.x) * scale,
                                             fmaf(-excess, mean_.y, sum.y) * scale);
      words.y = ElementTraits<Element>::pack(fmaf(-excess, mean_.z, sum.z) * scale,
                                             fmaf(-excess, mean_.w, sum.w) * scale);
    }
    if (!works_) return;
    auto* to = static_cast<uint16_t*>(params_.d_query) + batch_ * params_.query_strides.batch +
               head_ * params_.query_strides.head + token * params_.query_strides.token;
    *reinterpret_cast<uint2*>(to + column_) = words;
  }

  // The token's sequence.
  __device__ void open(int token) {
    const int rank =
        params_.q_ranks == nullptr ? 0 : __ldg(params_.q_ranks + int64_t{batch_} * params_.q_len + token);
    if (rank == rank_) return;
    rank_ = rank;
    sampled_ = false;
    const int seqs = num_seqs(params_);
    const Document document(params_, batch_ * (seqs / params_.batch) + rank, seqs);
    query_ = document.query, key_ = document.key;
    k_mixed_ = document.k_mixed;
    band_ = {params_.left, params_.right, params_.offset + document.query - document.key, document.q_len,
             document.k_len};
  }

  __device__ void take_mean(int first_query, int last_query) {
    sampled_ = true;
    const int64_t first = int64_t{batch_} * params_.kv_len + key_;
    const auto own = [&](int i) { return !k_mixed_ || __ldg(params_.k_ranks + first + i) == rank_; };
    mean_ = mean_of_keys<Element>(params_, batch_, head_ / params_.group,
                                  band_.keys_of(first_query, last_query), column_, own, key_);
  }

  const BackwardParams& params_;
  const int column_, sum_columns_;
  int first_, batch_, head_;
  int64_t row_;  // of the head's first query
  bool works_;   // the lane has columns
  int rank_ = -1, query_ = 0, key_ = 0;
  bool k_mixed_ = false, sampled_ = false;
  Band band_ = {};
  float4 mean_ = {};
};

__device__ __forceinline__ int64_t finish_units(const BackwardParams& params) {
  return int64_t{params.batch} * params.num_heads * ceil_div(params.q_len, kFinishRows);
}

template <typename Element>
__device__ __forceinline__ void finish(const BackwardParams& params, int dim) {
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  const int64_t unit = int64_t{ptx::block_x()} * kFinishWarps + threadIdx.x / 32;
  if (unit < finish_units(params)) Finisher<Element>(params, dim, unit, threadIdx.x % 32).work();
}

}  // namespace pallas_attn::attention::sm90::backward
