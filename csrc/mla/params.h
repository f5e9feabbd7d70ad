// Arguments of the MLA decode kernels, filled by whoever launches them.
//
// Shapes: b requests, s_q query tokens each, h_q heads, one latent KV head. A token of the cache is 576
// numbers, the 512 latent ones (also the value) followed by 64 rotary ones.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"

namespace pallas_attn::mla {

constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kQueryDim = kLatentDim + kRopeDim;
constexpr int kPageTokens = 64;

// One row of the schedule: what one SM part works on.
constexpr int kScheduleFields = 8;
enum ScheduleField {
  kBeginRequest = 0,
  kBeginToken = 1,  // where in the first request, a multiple of the page
  kEndRequest = 2,  // inclusive
  kEndToken = 3,    // where in the last request, exclusive
  kBeginSplit = 4,  // which split of the first request this is
};

enum class ElementType { kBfloat16, kFloat16 };

struct DecodeParams {
  const void* query;         // [b, s_q, h_q, 576]
  const void* latent_cache;  // [num_pages, 64, 1, 576]
  const int* block_tables;   // [b, max_blocks]
  const int* seq_lens;       // [b]
  const int* schedule;       // [num_sm_parts, 8]
  const int* num_splits;     // [b + 1], cumulative

  void* out;            // [b, s_q, h_q, 512]
  float* lse;           // [b, h_q, s_q], natural logarithm
  float* partial_out;   // [b + num_sm_parts, s_q * h_q, 512], used by requests of several splits
  float* partial_lse2;  // [b + num_sm_parts, s_q * h_q], base 2

  int batch;
  int query_len;
  int num_heads;
  int num_pages;
  int max_blocks;
  int num_sm_parts;
  float scale;  // positive
  bool causal;
  ElementType element;

  __host__ __device__ int rows() const { return query_len * num_heads; }
};

struct ScheduleParams {
  const int* seq_lens;  // [b]
  int* schedule;        // [num_sm_parts, 8]
  int* num_splits;      // [b + 1]
  int batch;
  int num_sm_parts;
  // Cost of starting a request (loading queries, writing the output) counted in pages.
  int overhead_pages;
};

}  // namespace pallas_attn::mla
