// Arguments of attention's backward pass over keys in rows, filled by whoever launches it. All lengths and
// sizes are in tokens, all strides in elements.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/element_type.h"

namespace pallas_attn::attention {

// A tile of keys, or of queries, to be taken: 16 bytes, so that it is loaded at once.
struct alignas(16) ListedTile {
  int seq;
  int number;  // of the sequence's tiles
  int before;  // the number of the tile in front of it that has tokens, too; negative: none
};

// A block of the other side that a block's tokens meet. 8 bytes, so that it is loaded at once.
struct alignas(8) ListedBlock {
  int number;  // of the other side's blocks
  int bits;    // the number that the pair of blocks has in `bits`; negative: all of its pairs count
};

// For each block of one side, those of the other that it meets.
struct BlockLists {
  const ListedBlock* blocks;  // [batch or 1, num_heads or 1, rows, pitch]; null: no lists
  const int* counts;          // [batch or 1, num_heads or 1, rows]: how many there are
  int batch, heads, rows, pitch;
};

// The same of a layout, over where tokens stand in their sequences: a compressed sparse row matrix whose rows
// ascend.
struct SparseRows {
  const int* pointers;  // [num_heads or 1, rows + 1]; null: no layout
  const int* blocks;    // [num_heads or 1, pitch]
  int heads, rows, pitch;
};

// What the kernels in a row tell each other.
struct BackwardCounters {
  int taken;  // tiles that CTAs have asked for
  int tiles;  // of one head
};
constexpr int kMostPasses = 3;

struct BackwardParams {
  const void* query;  // head_dim elements a head
  const void* key;
  const void* value;  // value_dim elements a head
  const void* d_out;
  Strides query_strides, key_strides, value_strides, out_strides;  // of gradients, too

  Spans q_spans, k_spans;   // of documents; null: each sequence has all of its batch
  const int* q_ranks;       // documents: [batch, q_len], the number among its batch's of the one that a
  const int* k_ranks;       // token is of; [batch, kv_len]
  const int* num_seqs_now;  // how many documents there are in each batch; null: seqs_per_batch

  // A mask, in place of documents and of `left` and `right`; of either side.
  BlockLists of_keys, of_queries;
  const uint32_t* bits;  // [max_bits, queries / 64, keys / 64, 128 threads], as they hold 64 x 64 scores
  int max_bits;
  // A layout, beside documents whose last query stands at their last key: causal besides. A head of keys
  // whose row pointers begin below 0 has gradients of NaN, and so have queries whose log-sum-exp is.
  SparseRows rows_of_keys, rows_of_queries;
  int q_shift, k_shift;  // log2 of a block's queries and keys, of either, at least 7

  // A number a query, [batch, num_heads, q_len]. The log-sum-exp in two parts, both finite: a maximum of what
  // is scaled, and the rest in base 2; what is taken off the gradients of weights; and the sum over keys of
  // the gradients of logits.
  const float* maximum;
  const float* rest;
  const float* delta;
  const float* total;
  // ALiBi's slopes, [num_heads], of one pass without a soft cap; the maximum is then one of natural logits.
  // Null: none.
  const float* alibi;

  void* d_query;
  void* d_key;
  void* d_value;

  // Scratch.
  BackwardCounters* counters;  // [kMostPasses]
  ListedTile* key_tiles;       // [batch * kv_len]
  ListedTile* query_tiles;     // [batch * q_len], of heads that take three passes
  int* turns;   // [batch, q_len, num_heads], of a query tile's first query: behind the last key tile that has
                // added to its gradient
  float* sums;  // [batch, num_heads, q_len, sum_columns]: gradients of queries, as far as keys have been
                // added, and numbers that add up to what was multiplied with keys

  int batch, q_len, kv_len;
  int seqs_per_batch;
  int num_heads, num_kv_heads;
  int group;  // query heads of a KV head
  int head_dim, value_dim;
  // Query i sees keys i + offset - left to i + offset + right, as both lie in their arrays; negative: no
  // bound.
  int left, right, offset;
  int heads_together;  // KV heads whose tiles are taken side by side
  bool ordered;        // sums are added up in one order
  float scale;
  float softcap;  // 0: none
  ElementType element;
};

}  // namespace pallas_attn::attention
