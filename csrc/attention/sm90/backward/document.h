// Where a sequence's queries and keys lie, whatever its bounds are.
#pragma once

#include "attention/backward_params.h"
#include "common/load.h"
#include "common/math.h"

namespace pallas_attn::attention::sm90::backward {

__device__ __forceinline__ int num_seqs(const BackwardParams& params) {
  if (params.num_seqs_now == nullptr) return params.batch * params.seqs_per_batch;
  return params.batch * min(max(load_constant(params.num_seqs_now), 1), params.seqs_per_batch);
}

struct Document {
  int batch, rank;
  int query, q_len;  // of its batch
  int key, k_len;
  bool q_mixed, k_mixed;  // other documents' tokens lie between its own

  // Of a layout: keys in front of its first query, and other tokens in front of that in its first tile of
  // `rows`, so that tiles begin where blocks may.
  __device__ __forceinline__ int before() const { return k_len - q_len; }
  __device__ __forceinline__ int lead(int rows) const { return q_len == 0 ? 0 : before() & (rows - 1); }

  __device__ __forceinline__ Document(const BackwardParams& params, int seq, int seqs) {
    const int of_batch = seqs / params.batch;
    batch = seq / of_batch;
    rank = seq - batch * of_batch;
    const int row = batch * params.seqs_per_batch + rank;
    find(params.q_spans, row, params.q_len, query, q_len, q_mixed);
    find(params.k_spans, row, params.kv_len, key, k_len, k_mixed);
  }

 private:
  static __device__ __forceinline__ void find(const Spans& spans, int row, int length, int& first, int& count,
                                              bool& mixed) {
    first = 0, count = length, mixed = false;
    if (spans.bounds == nullptr) return;
    const int* bounds = spans.bounds + row * kDocumentStep;
    first = min(max(load_constant(bounds), 0), length);
    count = min(max(load_constant(bounds + 1), first), length) - first;
    mixed = load_constant(bounds + 2) == 0;
  }
};

}  // namespace pallas_attn::attention::sm90::backward
