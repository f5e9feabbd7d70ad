// Makes rows of the query's 16-bit type of what long prompts see in a cache of bytes, once a call: the
// forward kernel reads keys and values as often as a prompt has tiles, and would convert them as often.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention {

constexpr int kWidenTile = 128;

struct WidenParams {
  // The call as the forward kernel would have it: where queries and pages lie, and the window. Only this is
  // read of it.
  ForwardParams call;
  // Rows (queries times heads of a KV head) of a sequence that is worth it; and how many pairs of kWidenTile
  // rows and kWidenTile keys such sequences must have together, or none is taken.
  int least_rows, least_pairs;
  int room;  // tokens that the rows have room for; times num_seqs below 2^31

  // Rows of `call.element`: keys [num_kv_heads, room, head_dim], values [num_kv_heads, room, value_dim].
  void* key;
  void* value;
  // Sequences are taken in order as long as there is room. Of each: whether it is, and where its queries and
  // its rows lie, as documents [num_seqs, kDocumentStep], without tokens if it is not.
  int* taken;  // [num_seqs]
  int* q_bounds;
  int* k_bounds;
};

LaunchStatus launch_widen(const WidenParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention
