// Work items of tiles that have lists, the longest first: by the threads of a block together.
#pragma once

#include <cstdint>

#include "attention/lists.h"
#include "attention/params.h"
#include "attention/prepare/buckets.h"
#include "attention/prepare/prepare.h"
#include "common/block_team.h"
#include "common/math.h"

namespace pallas_attn::attention {

template <int kThreads>
struct OrderScratch {
  typename BlockTeam<kThreads, false>::Scratch team;
  int counts[kBuckets], starts[kBuckets];
  int first_tile[kMostPreparedSeqs + 3];  // tiles in front of each sequence
};

// CTAs that do so: one for some heads, those that are worked on side by side, or for lists that all heads
// have in common.
PALLAS_ATTN_HOST_DEVICE inline int ordering_ctas(const ForwardParams& params) {
  return params.lists.heads > 1 ? params.num_heads / params.lists.heads_together : 1;
}

// About how many blocks of 64 keys the item's list names. What is in the list, whoever works on it looks at.
__device__ inline int length_of(const ForwardParams& params, const ListedSequence& seq,
                                const WorkItem& item) {
  const int place = item.token + seq.offset;
  if (seq.k_len == 0 || place < 0) return 0;
  const List list(params.lists, seq.batch, item.head, place);
  const int64_t keys = int64_t{list.num_blocks} << params.lists.k_shift;
  const int within = params.lists.row_pointers == nullptr ? seq.k_len : (place | (kListedQueries - 1)) + 1;
  return static_cast<int>(min(keys, int64_t{within}) / 64);
}

template <int kThreads>
__device__ void order_lists(const ForwardParams& params, OrderScratch<kThreads>& scratch) {
  const BlockTeam<kThreads, false> team(scratch.team);
  const int num_seqs = params.num_seqs, seqs = num_seqs + padding_seqs(params);
  const bool of_heads = params.lists.heads > 1;
  const int heads = of_heads ? params.lists.heads_together : 1,
            first_head = static_cast<int>(blockIdx.x) * heads;

  const auto tiles_of = [&](int seq) {
    const ListedSequence sequence(params, seq, num_seqs);
    return !sequence.padding && sequence.q_len <= params.skip_rows ? 0 : sequence.tiles();
  };
  int tiles = team.prefix_sum(seqs, tiles_of, scratch.first_tile).sum;
  // Lengths that lie end to end add up to what there is room for; what else may come does not get through.
  tiles = min(tiles, params.max_items / params.lists.heads);
  team.each(kBuckets, [&](int bucket) { scratch.counts[bucket] = 0; });
  const auto item_of = [&](int i) {
    const int tile = i / heads;
    const int seq = last_up_to(scratch.first_tile, seqs, tile);
    const ListedSequence sequence(params, seq, num_seqs);
    WorkItem item = sequence.item(seq, tile - scratch.first_tile[seq], first_head + i % heads);
    item.num_keys = length_of(params, sequence, item);
    return item;
  };
  team.each(tiles * heads, [&](int i) { atomicAdd(&scratch.counts[bucket_of(item_of(i).num_keys)], 1); });
  team.prefix_sum(kBuckets, [&](int bucket) { return scratch.counts[bucket]; }, scratch.starts);
  __syncthreads();
  WorkItem* const items = params.items + int64_t{first_head} * tiles;
  team.each(tiles * heads, [&](int i) {
    const WorkItem item = item_of(i);
    items[atomicAdd(&scratch.starts[bucket_of(item.num_keys)], 1)] = item;
  });
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *params.counters = {0, tiles * params.lists.heads, 0, of_heads ? 1 : params.lists.heads_together};
  }
}

}  // namespace pallas_attn::attention
