// Which keys a query sees, and where sequences lie: what preparing and computing must agree on.
#pragma once

#include <climits>

#include "attention/params.h"
#include "common/host_device.h"
#include "common/load.h"
#include "common/math.h"

namespace pallas_attn::attention {

// Of one sequence, from its arrays, whatever they hold: bounds lie within the arrays. Behind the last
// sequence stand two that have no keys: tokens behind all sequences, and before them.
struct Sequence {
  int batch;
  int q_begin, q_len;  // of its batch
  int k_len;
  // Keys [0, in_pages) lie in pages, the others in rows of its batch, from k_begin on.
  int in_pages, k_begin;
  int offset;  // query i stands at key i + offset
  int rank;    // documents: its number among its batch's
  bool bad;    // lengths that cannot be right
  bool padding;
  bool q_mixed, k_mixed;  // other documents' tokens lie between its own

  PALLAS_ATTN_HOST_DEVICE Sequence(const ForwardParams& params, int seq, int num_seqs) {
    bad = q_mixed = k_mixed = false;
    padding = seq >= num_seqs;
    const Spans& q = params.q_spans;
    const bool documents = q.step == kDocumentStep;
    const int of_batch = documents ? num_seqs / params.batch : params.seqs_per_batch;
    batch = padding ? 0 : seq / of_batch;
    rank = seq - batch * of_batch;
    const int row = documents ? batch * params.seqs_per_batch + rank : seq;
    int begin = 0, end = params.q_len;
    if (q.bounds != nullptr && !padding) {
      begin = load_constant(q.bounds + row * q.step);
      end = load_constant(q.bounds + row * q.step + 1);
      if (params.q_ranks != nullptr) q_mixed = load_constant(q.bounds + row * q.step + 2) == 0;
    } else if (padding) {
      const bool behind = seq == num_seqs;
      if (behind) begin = load_constant(q.bounds + num_seqs * q.step);
      if (!behind) end = load_constant(q.bounds);
    }
    q_begin = at_most(params.q_len, at_least(0, begin));
    q_len = at_most(params.q_len, at_least(q_begin, end)) - q_begin;
    in_pages = k_begin = k_len = offset = 0;
    if (padding) return;

    if (params.block_tables != nullptr) {
      k_len = load_constant(params.seq_lens + seq);
      const bool apart = params.new_key != nullptr;
      const int in_rows = apart ? q_len : 0;
      bad = k_len < in_rows || k_len - in_rows > int64_t{params.max_pages} * params.page_size;
      in_pages = apart ? k_len - in_rows : INT_MAX;
      k_begin = q_begin;
    } else if (params.k_spans.bounds != nullptr) {
      const int* bounds = params.k_spans.bounds + row * params.k_spans.step;
      k_begin = load_constant(bounds);
      k_len = load_constant(bounds + 1) - k_begin;
      if (params.k_ranks != nullptr) k_mixed = load_constant(bounds + 2) == 0;
      // A document without keys may have any bounds.
      if (k_len <= 0) k_begin = k_len = 0;
      bad = k_begin < 0 || k_begin + k_len > params.kv_len;
    } else {
      k_len = params.kv_len;
    }
    if (bad) k_begin = k_len = 0;
    offset = params.ends_aligned ? k_len - q_len : q_begin - k_begin + params.q_offset;
  }
};

// How far a query sees from its place; negative: all.
struct Window {
  int left, right;

  PALLAS_ATTN_HOST_DEVICE explicit Window(const ForwardParams& params)
      : left(load_constant(params.window)), right(load_constant(params.window + 1)) {}

  // Keys [begin, end) that a query at `place` sees, of a sequence of k_len.
  PALLAS_ATTN_HOST_DEVICE int begin(int place) const { return left < 0 || left >= place ? 0 : place - left; }
  PALLAS_ATTN_HOST_DEVICE int end(int place, int k_len) const {
    if (right < 0 || place >= k_len) return k_len;
    return at_least(0, place + 1 + at_most(k_len - place - 1, right));
  }
};

PALLAS_ATTN_HOST_DEVICE inline int num_seqs_now(const ForwardParams& params) {
  if (params.num_seqs_now == nullptr) return params.num_seqs;
  const int now = load_constant(params.num_seqs_now);
  if (params.q_spans.step == kDocumentStep) {
    return params.batch * at_most(params.seqs_per_batch, at_least(1, now));
  }
  return at_most(params.num_seqs, at_least(0, now));
}

// Whether sequences are the rows of a batch as they are, and no tile's keys are split: then nothing is
// sorted, as all sequences have the same tiles.
PALLAS_ATTN_HOST_DEVICE inline bool has_equal_sequences(const ForwardParams& params) {
  return params.q_spans.bounds == nullptr && params.k_spans.bounds == nullptr &&
         params.block_tables == nullptr && params.max_partials == 0;
}

// Of a sequence: the tile's queries, `tokens` of them but for the last tile, and the key tiles that they see.
PALLAS_ATTN_HOST_DEVICE inline WorkItem item_of(const Sequence& sequence, const Window& window, int seq,
                                                int tile, int tokens, int keys) {
  WorkItem item = {seq, tile * tokens, 0, 0, 0, -1, -1};
  item.tokens = at_most(tokens, sequence.q_len - item.token);
  const int place = item.token + sequence.offset;
  const int begin = window.begin(place), end = window.end(place + item.tokens - 1, sequence.k_len);
  if (begin < end) {
    item.first_key = begin / keys;
    item.num_keys = ceil_div(end, keys) - item.first_key;
  }
  return item;
}

// Tokens may be no sequence's where those lie end to end.
PALLAS_ATTN_HOST_DEVICE inline int padding_seqs(const ForwardParams& params) {
  return params.q_spans.bounds != nullptr && params.q_spans.step == 1 ? 2 : 0;
}

}  // namespace pallas_attn::attention
