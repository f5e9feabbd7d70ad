// Which list a tile has, and how tiles of a sequence lie where there are lists: what preparing and computing
// must agree on.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/rules.h"
#include "common/host_device.h"
#include "common/load.h"
#include "common/math.h"

namespace pallas_attn::attention {

constexpr int kListedQueries = 128;  // of a tile, all of one list

// Tiles begin where a query's place is a multiple of their size.
struct ListedSequence : Sequence {
  PALLAS_ATTN_HOST_DEVICE ListedSequence(const ForwardParams& params, int seq, int num_seqs)
      : Sequence(params, seq, num_seqs) {
    // Of lengths end to end none is negative.
    const int* ends = params.k_spans.bounds;
    if (!padding && ends != nullptr) bad |= load_constant(ends + seq + 1) < load_constant(ends + seq);
  }

  PALLAS_ATTN_HOST_DEVICE int first_place() const { return offset & -kListedQueries; }
  PALLAS_ATTN_HOST_DEVICE int tiles() const {
    return q_len == 0 ? 0 : ceil_div(offset + q_len - first_place(), kListedQueries);
  }
  PALLAS_ATTN_HOST_DEVICE WorkItem item(int seq, int tile, int head) const {
    const int first = first_place() + tile * kListedQueries;
    const int place = at_least(offset, first), end = at_most(offset + q_len, first + kListedQueries);
    return {seq, place - offset, end - place, 0, 0, -1, head};
  }
};

PALLAS_ATTN_HOST_DEVICE inline int united_rows(const KeyLists& lists) { return (lists.rows + 1) / 2; }

// Blocks [0, num_blocks) of a list, by what its row says: entries are not looked at.
struct List {
  const int* blocks;
  int num_blocks = 0, whole_blocks = 0;  // a layout: the latter is not known yet
  int64_t number = 0;                    // of all lists
  bool bad;

  // Of the queries around `place`.
  PALLAS_ATTN_HOST_DEVICE List(const KeyLists& lists, int batch, int head, int place) {
    const int row = place >> lists.q_shift, own_head = lists.heads > 1 ? head : 0;
    blocks = lists.blocks;
    bad = row >= lists.rows;
    if (bad) return;
    if (lists.united != nullptr) {
      number = int64_t{own_head} * united_rows(lists) + (row >> 1);
      blocks = lists.united + int64_t{own_head} * lists.pitch;
      num_blocks = load_constant(&lists.united_row[number].count);
      return;
    }
    if (lists.row_pointers != nullptr) {
      const int* pointers = lists.row_pointers + int64_t{own_head} * (lists.rows + 1) + row;
      const int begin = load_constant(pointers), end = load_constant(pointers + 1);
      bad = begin < 0 || end < begin || end > lists.pitch;
      if (bad) return;
      blocks += int64_t{own_head} * lists.pitch + begin;
      num_blocks = end - begin;
      return;
    }
    number = (int64_t{lists.batch > 1 ? batch : 0} * lists.heads + own_head) * lists.rows + row;
    blocks += number * lists.pitch;
    num_blocks = at_most(lists.pitch, at_least(0, load_constant(lists.ends + number * 2 + 1)));
    whole_blocks = at_most(num_blocks, at_least(0, load_constant(lists.ends + number * 2)));
  }
};

}  // namespace pallas_attn::attention
