// Arguments of the sparse MLA kernels: to them a query token is what a request is to the dense ones, and the
// ids it has chosen are the request's tokens.
#pragma once

#include <cstdint>

#include "mla/params.h"

namespace pallas_attn::mla {

// How a token lies in the pool. kPlain: 576 of the query's elements. kFp8: 656 bytes, 512 e4m3 | 4 float32
// scales, each of 128 of them | 64 bfloat16.
enum class RowFormat { kPlain, kFp8 };

// Of a DecodeParams, b is the number of query tokens, each with one KV head and s_q = 1;
// latent_cache is [num_rows, 576 elements or 656 bytes], pages laid end to end;
// seq_lens says how many of a token's ids count, max_blocks how many tiles of 64 all of them are;
// block_tables [b / tokens_a_table, table_columns] is read where ids are positions.
struct SparseParams : DecodeParams {
  const int* indices;  // [b, topk]
  // [b, h_q], natural units, or null; never where tokens are cut.
  float* max_logits;

  int topk;
  int num_rows;
  int page_size;  // of the pool that positions lead into; 0 where ids are rows
  unsigned page_reciprocal;
  int table_columns;
  int tokens_a_table;
  // An id that names no row is skipped, instead of -1 alone.
  bool skip_all_outside;
  // The schedule leaves every token in one piece.
  bool nothing_is_cut;
  RowFormat format;

  void set_pool(int rows, int rows_a_page) {
    const int size = page_size = rows_a_page;
    num_rows = rows;
    num_pages = size > 0 ? rows / size : 0;
    page_reciprocal = size > 1 ? (uint64_t{1} << 32) / size : ~0u;  // 2^32 / size, as far as it fits
  }
};

}  // namespace pallas_attn::mla
