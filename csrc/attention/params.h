// Arguments of attention over dense, packed or paged keys, filled by whoever launches it. All lengths and
// sizes are in tokens, all strides in elements.
#pragma once

#include <cstdint>

#include "common/element_type.h"
#include "common/row_lse.h"

namespace pallas_attn::attention {

// Where an array's heads, tokens and batches lie. The elements of a head are neighbours.
struct Strides {
  int64_t head, token, batch;
};

// Where sequence i's tokens lie: [bounds[i * step], bounds[i * step + 1]) of its batch; null: all of the
// batch. Lengths that lie end to end have step 1. Documents have step 3 and may lie anywhere: the third word
// says whether all tokens between are the document's, or else those whose rank is its number.
struct Spans {
  const int* bounds;
  int step;
};
constexpr int kDocumentStep = 3;

// What one CTA does at a time: a tile of a sequence's queries, all heads of one KV head, against a run of key
// tiles. 32 bytes, so that it is loaded at once.
struct alignas(32) WorkItem {
  int seq;        // num_seqs and above: tokens that are no sequence's
  int token;      // first query, counted from the sequence's first
  int tokens;     // queries
  int first_key;  // key tiles [first_key, first_key + num_keys)
  int num_keys;
  int partial;  // the number of its partial result; negative: the tile's keys are not split
  int head;     // whose lists are each head's own: the query head
};

// A tile whose keys are split, to be merged: its parts' results are neighbours.
struct alignas(32) SplitTile {
  int seq, token, tokens;  // as in WorkItem
  int first_partial, splits;
};

// What the kernels in a row tell each other.
struct Counters {
  int taken;  // work items that CTAs have asked for
  int items;  // work items of one KV head
  int split_tiles;
  // KV heads whose tiles are taken side by side, a divisor of num_kv_heads; of equal sequences, pairs of a
  // sequence and a KV head.
  int together;
};

// What keys and values in pages are.
enum class CacheType { kElement, kE4m3, kInt8 };

constexpr int kMostSplits = 32;  // of a tile

// Blocks of a sequence's keys, by their numbers: a list for every 1 << q_shift queries. Those that all of
// these see whole stand first. Tiles are then of 128 queries of one head. Either of two forms:
//
//   a mask    list i has room for `pitch` blocks, of which `ends` says how many are seen whole, and how many
//   at
//             all; which query sees which key of the others is in `bits`
//   a layout  a compressed sparse row matrix for each head, of `pitch` columns, ascending. Its rows go by
//   where
//             queries stand in their sequence. Attention is causal besides, so what is seen in part lies
//             where the tile's own queries do, behind all else. Rows and columns of 64: two rows are united
//             to the list of a tile
struct UnitedRow {
  int begin;  // of its head's entries
  // Entries [0, whole) are seen by both halves of the tile, [past, count) lie at its queries' own positions.
  int whole, past, count;
  int bad;  // a bit for each half whose row cannot be right
};
// With an entry that is not seen by both: which half sees it, of 64 queries each.
constexpr int kSeenByUpper = 1 << 29, kSeenByLower = 1 << 30, kBlockBits = kSeenByUpper - 1;

struct KeyLists {
  const int* blocks;  // [batch or 1, heads or 1, rows, pitch]; layout: [heads or 1, pitch]; null: no lists
  const int* ends;    // [batch or 1, heads or 1, rows, 2]
  const int*
      first_bits;        // [batch or 1, heads or 1, rows]: the number that a list's first block has in `bits`
  const uint32_t* bits;  // [max_bits, queries / 64, keys / 64, 128 threads], as they hold 64 x 64 scores
  const int* row_pointers;  // [heads or 1, rows + 1]; null: a mask
  int* united;              // scratch, of as many entries as `blocks` has; null: rows are not united
  UnitedRow* united_row;    // scratch, [heads or 1, rows / 2, rounded up]
  int batch, heads, rows;   // of the lists; 1: for all
  int pitch, max_bits;
  // log2 of a block's queries, at least 7 or, where rows are united, 6, and of its keys, at least 6.
  int q_shift, k_shift;
  int share;           // query heads of a KV head
  int heads_together;  // heads whose tiles are taken side by side, a divisor of all
};

struct ForwardParams {
  const void* query;  // head_dim elements a head
  const void* key;
  const void* value;  // value_dim elements a head
  // Beside keys in pages: those of the newest tokens in rows, the queries' own; null: pages hold them too.
  const void* new_key;
  const void* new_value;
  Strides query_strides, key_strides, value_strides, new_key_strides, new_value_strides;
  Strides out_strides, lse_strides;

  Spans q_spans;
  Spans k_spans;            // keys in rows
  const int* q_ranks;       // documents: [batch, q_len], the number among its batch's of the one that a
  const int* k_ranks;       // token is of; [batch, kv_len]; null: all lie in one piece
  const int* block_tables;  // keys in pages: [num_seqs, max_pages]; null: in rows
  const int* seq_lens;      // keys in pages: [num_seqs], new ones included
  const int* num_seqs_now;  // how many sequences there are, documents: in each batch; null: num_seqs
  const int* window;        // [2]: how many keys left and right of a query's place it sees; negative: all
  const float* scale;       // [1], of the logits
  const float* sinks;       // [num_heads], or null
  const float* alibi;       // [num_heads], or null
  // Of caches of bytes: [num_kv_heads], or [num_pages, num_kv_heads].
  const float* key_scale;
  const float* value_scale;
  bool key_scale_by_page, value_scale_by_page;

  void* out;
  float* lse;
  // What gradients need, or null: then `lse` is whole; else it has the maxima of rows, of what a backward
  // pass scales, and `rest` what is left of the log-sum-exp, base 2.
  float* rest;
  void* low;  // a byte of out's lower bits for each element, in its place; or null

  Counters equal;  // of equal sequences: what `counters` will say. Nobody has to wait for that
  // Scratch.
  Counters* counters;
  WorkItem* items;         // [max_items]
  SplitTile* split_tiles;  // [max_partials]; null: nothing may be split
  int* first_tile;         // [sequences + 1], where those are more than shared memory has room for
  float* partial_out;      // [max_partials, num_kv_heads, tile rows, value_dim]
  RowLse* partial_lse;     // [max_partials, num_kv_heads, tile rows]
  int max_items, max_partials;

  int batch, q_len, kv_len;  // of the arrays of rows
  int num_pages, page_size, max_pages;
  int num_seqs, seqs_per_batch;
  int num_heads, num_kv_heads;
  int group;  // query heads of a KV head
  int head_dim, value_dim;
  // A sequence's query i stands at key i + its number of keys less that of its queries; or else at its own
  // place in the array plus q_offset.
  bool ends_aligned;
  bool sinks_without_keys;  // a query of a sequence that has no keys sees the sink
  int q_offset;
  // Sequences with at most so many rows (queries times heads of a KV head) are another kernel's: nothing of
  // theirs is written.
  int skip_rows;
  const int* taken;  // [num_seqs], likewise: not 0 of another kernel's sequences; or null
  // Of a KV head: so many keys fit in the L2 with their values.
  int keys_in_l2;
  float softcap;  // 0: none
  bool base2_lse;
  ElementType element;
  CacheType cache;
  // Of which keys there are lists, `num_kv_heads` and `group` are those of heads with lists of their own: all
  // query heads, and 1.
  KeyLists lists;
};

}  // namespace pallas_attn::attention
