// Arguments of attention's backward pass over keys in rows, filled by whoever launches it. All lengths and
// sizes are in tokens, all strides in elements.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/element_type.h"

namespace pallas_attn::attention {

struct BackwardParams {
  const void* query;  // head_dim elements a head
  const void* key;
  const void* value;  // value_dim elements a head
  const void* d_out;
  Strides query_strides, key_strides, value_strides, out_strides;  // of gradients, too

  // A number a query, [batch, num_heads, q_len]. The log-sum-exp in two parts, both finite: a maximum of what
  // is scaled, and the rest in base 2; what is taken off the gradients of weights; and the sum over keys of
  // the gradients of logits.
  const float* maximum;
  const float* rest;
  const float* delta;
  const float* total;

  void* d_query;
  void* d_key;
  void* d_value;

  // Scratch. A slot is a tile of queries of one head.
  float* sums;    // [slots, tile's queries, dim]: gradients of queries, as far as keys have been added
  float* counts;  // [slots, math warpgroups, 64]: sums of what was multiplied with keys
  int* turns;     // [slots], zeros: how many tiles of keys have added theirs
  int* taken;     // [1], zero: how many tiles of keys have been taken

  int batch, q_len, kv_len;
  int num_heads, num_kv_heads;
  int group;  // query heads of a KV head
  int head_dim, value_dim;
  // Query i sees keys i + offset - left to i + offset + right; negative: no bound.
  int left, right, offset;
  // KV heads of sequences whose tiles are taken side by side.
  int together;
  float scale;
  float softcap;  // 0: none
  ElementType element;
};

}  // namespace pallas_attn::attention
