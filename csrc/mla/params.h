// Arguments of the MLA decode kernels, filled by whoever launches them.
//
// Shapes: b requests, s_q query tokens each, h_kv latent KV heads with a group of query heads each, h_q heads
// in all (published models have h_kv = 1). A token of a KV head is 576 numbers, the 512 latent ones (also the
// value) followed by 64 rotary ones. The s_q x group rows that share a KV head lie together: row = token *
// group + head in the group.
#pragma once

#include <cstdint>

#include "common/element_type.h"
#include "common/host_device.h"
#include "common/row_lse.h"

namespace pallas_attn::mla {

constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kQueryDim = kLatentDim + kRopeDim;
constexpr int kPageTokens = 64;

// A token in 656 bytes, as FlashMLA and vLLM keep DeepSeek-V3.2's: the latent dimensions in e4m3, a float32
// scale for every 128 of them, the rotary ones in bf16.
constexpr int kScaleGroup = 128;
constexpr int kScalesAt = kLatentDim;
constexpr int kRopeAt = kScalesAt + kLatentDim / kScaleGroup * 4;
constexpr int kTokenBytes = kRopeAt + kRopeDim * 2;

// One row of the schedule: what one SM part works on.
constexpr int kScheduleFields = 8;
enum ScheduleField {
  kBeginRequest = 0,
  kBeginToken = 1,  // where in the first request, a multiple of the page
  kEndRequest = 2,  // inclusive
  kEndToken = 3,    // where in the last request, exclusive
  kBeginSplit = 4,  // which split of the first request this is
};

// Of the cache: the query's type, or tokens of 656 bytes under a query of bf16.
enum class LatentFormat { kElements, kBytes };

struct DecodeParams {
  const void* query;         // [b, h_kv, s_q, group, 576]
  const void* latent_cache;  // [num_pages, 64, h_kv, 576], or 656 bytes instead
  const int* block_tables;   // [b, max_blocks]
  const int* seq_lens;       // [b]
  const int* schedule;       // [num_sm_parts, 8]
  const int* num_splits;     // [b + 1], cumulative
  // A further logit of each row of a request, without a value; natural units, or null.
  const float* sinks;  // [h_kv, s_q, group]

  void* out;   // [b, h_kv, s_q, group, 512]
  float* lse;  // [b, s_q, h_q], natural logarithm
  // Partial results of the requests that were cut. A part leaves at most two, of its first and of its last
  // request, so there is room for two a part. Split k of request i has number
  //   2 * (num_splits[i] - i) + k.
  // num_splits[i] - i cuts come before request i, and a request that is cut c times has c + 1 <= 2 c splits:
  // numbers never collide, and the last of num_sm_parts - 1 cuts leaves them below 2 * (num_sm_parts - 1).
  float* partial_out;   // [2 * num_sm_parts, h_kv, s_q, group, 512]
  RowLse* partial_lse;  // [2 * num_sm_parts, h_kv, s_q, group]

  int batch;
  int query_len;
  int num_kv_heads;
  int group;
  int num_pages;
  int max_blocks;
  int num_sm_parts;
  float scale;  // positive
  bool causal;
  // Merge in a kernel that follows, never inside a cooperative grid: see launch_plan.h.
  bool merge_apart;
  ElementType element;
  LatentFormat format;

  // Of one KV head, and of a request.
  PALLAS_ATTN_HOST_DEVICE int rows() const { return query_len * group; }
  PALLAS_ATTN_HOST_DEVICE int all_rows() const { return num_kv_heads * rows(); }

  PALLAS_ATTN_HOST_DEVICE int64_t query_bytes() const {
    return int64_t{batch} * all_rows() * (kQueryDim * 2);  // bf16 or fp16
  }

  // Partial results there is room for.
  PALLAS_ATTN_HOST_DEVICE int num_partials() const { return 2 * num_sm_parts; }

  // Where a row's lse goes; `row` counts within the KV head.
  PALLAS_ATTN_HOST_DEVICE float* lse_of(int request, int kv_head, int row) const {
    const int64_t token = static_cast<int64_t>(request) * query_len + row / group;
    return lse + (token * num_kv_heads + kv_head) * group + row % group;
  }
};

struct ScheduleParams {
  const int* seq_lens;  // [b]
  int* schedule;        // [num_sm_parts, 8]
  int* num_splits;      // [b + 1]
  int batch;
  int num_sm_parts;
  // Cost of starting a request (loading queries, writing the output) counted in pages; 0 for what suits the
  // lengths, which depends on `rows` too, the query rows of a KV head.
  int overhead_pages;
  int rows;
};

}  // namespace pallas_attn::mla
