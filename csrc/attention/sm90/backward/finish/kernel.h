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
constexpr int kFinishAhead = 32 / kCountColumns;  // rows loaded: a lane has one of their counts

template <typename Element>
class Finisher {
 public:
  // Of unit `unit`: so many rows of a head. A token's heads follow each other: they are neighbours in memory.
  __device__ Finisher(const BackwardParams& params, int dim, int64_t unit, int lane)
      : params_(params), lane_(lane), column_(lane * kMeanColumns), dim_(dim) {
    const int of_head = ceil_div(params.q_len, kFinishRows);
    const int64_t rows = unit / params.num_heads;
    head_ = static_cast<int>(unit - rows * params.num_heads);
    batch_ = static_cast<int>(rows / of_head);
    first_ = static_cast<int>(rows - int64_t{batch_} * of_head) * kFinishRows;
    row_ = (int64_t{batch_} * params.num_heads + head_) * params.q_len;
    works_ = column_ < params.head_dim;
    to_ = static_cast<uint16_t*>(params.d_query) + batch_ * params.query_strides.batch +
          head_ * params.query_strides.head + column_;
  }

  __device__ void work() {
    const int end = min(first_ + kFinishRows, params_.q_len);
#pragma unroll 1
    for (int token = first_; token < end; token += kFinishAhead) {
      const int own = min(token + lane_ / kCountColumns, end - 1);
      float excess = __ldcg(sums_of(own) + dim_ + lane_ % kCountColumns);
      const float total = __ldg(params_.total + row_ + own);
      const int rank = rank_of(own);
      float4 sum[kFinishAhead];
#pragma unroll
      for (int i = 0; i < kFinishAhead; ++i) {
        const auto* from = reinterpret_cast<const float4*>(sums_of(min(token + i, end - 1)) + column_);
        sum[i] = works_ ? __ldcg(from) : float4{};
      }
#pragma unroll
      for (int apart = 1; apart < kCountColumns; apart *= 2) excess += __shfl_xor_sync(~0u, excess, apart);
      excess = params_.softcap > 0.0f ? 0.0f : excess - total;
      // Row by row of a sequence: what opens one is here once, in a loop that fits the instruction cache.
      const int rows = min(kFinishAhead, end - token);
#pragma unroll 1
      for (int done = 0; done < rows;) {
        open(__shfl_sync(~0u, rank, done * kCountColumns), token + done, end);
        const uint32_t others = __ballot_sync(~0u, rank != rank_) >> done * kCountColumns;
        const int to = others == 0 ? rows : min(done + (__ffs(others) - 1) / kCountColumns, rows);
#pragma unroll
        for (int i = 0; i < kFinishAhead; ++i) {
          const float of_row = __shfl_sync(~0u, excess, i * kCountColumns);
          if (i >= done && i < to) store(token + i, sum[i], of_row);
        }
        done = to;
      }
    }
  }

 private:
  __device__ const float* sums_of(int token) const {
    return params_.sums + (row_ + token) * (dim_ + kCountColumns);
  }

  // Of the token's sequence.
  __device__ int rank_of(int token) const {
    return params_.q_ranks == nullptr ? 0 : __ldg(params_.q_ranks + int64_t{batch_} * params_.q_len + token);
  }

  __device__ void store(int token, float4 sum, float excess) const {
    if (!works_) return;
    const int query = token - query_;
    const Span seen = band_.keys_of(query, query);
    uint2 words = make_uint2(0, 0);
    if (seen.begin < seen.end) {
      const float scale = params_.scale;
      words.x = ElementTraits<Element>::pack(fmaf(-excess, mean_.x, sum.x) * scale,
                                             fmaf(-excess, mean_.y, sum.y) * scale);
      words.y = ElementTraits<Element>::pack(fmaf(-excess, mean_.z, sum.z) * scale,
                                             fmaf(-excess, mean_.w, sum.w) * scale);
    }
    *reinterpret_cast<uint2*>(to_ + token * params_.query_strides.token) = words;
  }

  // The sequence of `token`, and the mean of keys that its queries see from there to `end`.
  __device__ void open(int rank, int token, int end) {
    if (rank == rank_) return;
    rank_ = rank;
    const int seqs = num_seqs(params_);
    const Document document(params_, batch_ * (seqs / params_.batch) + rank, seqs);
    query_ = document.query;
    band_ = {params_.left, params_.right, params_.offset + document.query - document.key, document.q_len,
             document.k_len};
    const int last = min(end - query_, document.q_len) - 1;
    const int64_t first = int64_t{batch_} * params_.kv_len + document.key;
    const auto own = [&](int i) { return !document.k_mixed || __ldg(params_.k_ranks + first + i) == rank; };
    mean_ = mean_of_keys<Element>(params_, batch_, head_ / params_.group, band_.keys_of(token - query_, last),
                                  column_, own, document.key);
  }

  const BackwardParams& params_;
  const int lane_, column_, dim_;
  int first_, batch_, head_;
  int64_t row_;   // of the head's first query
  bool works_;    // the lane has columns
  uint16_t* to_;  // these, of the gradient of the batch's first query
  int rank_ = -1, query_ = 0;
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
