// Arguments of block-sparse prefill, filled by whoever launches it.
//
// Sequences of any lengths lie end to end; each brings its newest tokens as queries. The layout is a
// compressed sparse row matrix for each head: row i stands for the queries at positions [i << q_block_shift,
// ...) of any sequence, column j for the keys at [j << block_shift, ...), ascending within a row. Attention
// is causal besides.
#pragma once

#include <vector_types.h>

#include "common/element_type.h"

namespace pallas_attn::blocksparse {

struct PrefillParams {
  const void* query;        // [num_tokens, num_heads, 128]
  const void* key;          // [num_key_tokens, num_kv_heads, 128]
  const void* value;        // the same
  const int* cu_q_lens;     // [num_seqs + 1], where each sequence's queries begin and the last one's end
  const int* cu_k_lens;     // [num_seqs + 1], the same for keys
  const int* row_pointers;  // [layout_heads, num_rows + 1]
  const int* columns;       // [layout_heads, num_columns]

  void* out;    // [num_tokens, num_heads, 128]
  float2* lse;  // [num_tokens, num_heads]: maximum of scores, not scaled, and log2 of the sum relative to it
  // How many tiles have been taken; zeroed by the launch.
  int* taken;

  int num_tokens;
  int num_key_tokens;
  int num_seqs;
  int num_heads;
  int num_kv_heads;
  int layout_heads;  // num_heads, or 1 for all
  int num_rows;
  int num_columns;
  int block_shift, q_block_shift;  // log2 of the layout's block sizes, at least 7
  // Heads whose tiles are taken together, a divisor of num_heads.
  int heads_together;
  // Sequences with one query are another kernel's: nothing of theirs is written.
  bool skip_single;
  float scale;  // positive
  ElementType element;
};

}  // namespace pallas_attn::blocksparse
