// From lengths to work items, by one CTA.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/prepare/buckets.h"
#include "attention/prepare/prepare.h"
#include "attention/rules.h"
#include "common/block_team.h"

namespace pallas_attn::attention {

constexpr int kThreads = kPrepareThreads;
using Team = BlockTeam<kThreads, false>;

// What a work item costs beside its key tiles, 1.5 us of a key tile's 1.56 us on an H100, and what merging
// costs a call, in key tiles: that one is an estimate.
constexpr int kItemCost = 1, kMergeCost = 2;

// How the tiles' keys are split: the longest is in so many parts, and no part of another is longer.
constexpr int kCandidates = kThreads / 32;
static_assert(kCandidates == kMostSplits);

struct Scratch {
  Team::Scratch team;
  int counts[kBuckets], starts[kBuckets];
  int costs[kCandidates];
  int partials, split_tiles;
  int keys;          // of all sequences, each of which counts no more than fit in the L2
  int first_tile[];  // [sequences + 1]: tiles in front of each
};

// Of a tile: no more than is reckoned with below, however long it is.
__device__ int parts_of(int keys, int longest) { return max(ceil_div(min(keys, keys_of(0)), longest), 1); }

struct Batch {
  const ForwardParams& params;
  const Tiling tiling;
  const int num_seqs;

  __device__ int tiles_of(int seq) const {
    const Sequence sequence(params, seq, num_seqs);
    const int rows = sequence.q_len * params.group;
    if (!sequence.padding && rows <= params.skip_rows) return 0;
    return ceil_div(sequence.q_len, tiling.tokens);
  }

  __device__ WorkItem item(const Window& window, int seq, int tile) const {
    const Sequence sequence(params, seq, num_seqs);
    WorkItem item = item_of(sequence, window, seq, tile, tiling.tokens, tiling.keys);
    if (sequence.q_mixed && !holds(sequence, item)) item.tokens = 0;
    return item;
  }

  // Whether some of the item's queries are its document's.
  __device__ bool holds(const Sequence& sequence, const WorkItem& item) const {
    const int* ranks =
        params.q_ranks + int64_t{sequence.batch} * params.q_len + sequence.q_begin + item.token;
    for (int i = 0; i < item.tokens; ++i) {
      if (__ldg(ranks + i) == sequence.rank) return true;
    }
    return false;
  }
};

// How long the call takes if no part has more than `longest` key tiles, by one warp: CTAs share the work
// evenly, unless parts are so long that two of them make the longest run.
__device__ int cost_of(const ForwardParams& params, const int* counts, int longest, int ctas, int lane) {
  int work = 0, long_parts = 0, partials = 0;
  for (int bucket = lane; bucket < kBuckets; bucket += 32) {
    const int tiles = counts[bucket], keys = keys_of(bucket);
    if (tiles == 0) continue;
    const int parts = parts_of(keys, longest), part = ceil_div(keys, parts) + kItemCost;
    work += tiles * parts * part;
    if (2 * part > longest + kItemCost) long_parts += tiles * parts;
    if (parts > 1) partials += tiles * parts;
  }
  const int heads = params.num_kv_heads;
  work = __reduce_add_sync(~0u, work);
  long_parts = __reduce_add_sync(~0u, long_parts);
  partials = __reduce_add_sync(~0u, partials);
  if (partials > params.max_partials) return INT_MAX;
  const auto even = static_cast<int>(min(int64_t{work} * heads / ctas, int64_t{INT_MAX / 2}));
  return max(even, ceil_div(long_parts * heads, ctas) * (longest + kItemCost)) +
         (partials > 0 ? kMergeCost : 0);
}

// All side by side balance best; some at a time read keys from the L2, where the call is long enough for the
// last of them to be begun in time. `work`: key tiles of one.
__device__ bool lasts(int64_t work, int longest, int ctas) { return work >= int64_t{2} * longest * ctas; }

// Of `all`, each of which reads so many keys several times: a divisor.
__device__ int together_of(const ForwardParams& params, int all, int64_t keys, int64_t work, int longest,
                           int ctas) {
  int together = all;
  while (together > 1 && together * keys > params.keys_in_l2) {
    const int fewer = together % 2 == 0 ? together / 2 : 1;
    if (!lasts(work * fewer, longest, ctas)) break;
    together = fewer;
  }
  return together;
}

// Equal sequences: how many pairs of one and a KV head are taken side by side.
__device__ void prepare_equal(const ForwardParams& params, const Batch& batch, const Window& window,
                              const Team& team, Scratch& scratch) {
  const int tiles = batch.tiles_of(0);
  int own_work = 0, own_longest = 0;
  for (int tile = threadIdx.x; tile < tiles; tile += kThreads) {
    const int keys = batch.item(window, 0, tile).num_keys;
    own_work += keys;
    own_longest = max(own_longest, keys);
  }
  const int64_t work = team.prefix_sum(kThreads, [&](int) { return own_work; }, scratch.starts).sum;
  const int longest = team.prefix_sum(kThreads, [&](int) { return own_longest; }, scratch.starts).most;
  const int pairs = params.num_seqs * params.num_kv_heads;
  const int together = together_of(params, pairs, params.kv_len, work, longest, batch.tiling.ctas);
  if (threadIdx.x == 0) *params.counters = {0, tiles * params.num_seqs, 0, together};
}

__device__ __forceinline__ void prepare(const ForwardParams& params, const Tiling& tiling, Scratch& scratch) {
  const Team team(scratch.team);
  const Batch batch = {params, tiling, num_seqs_now(params)};
  const Window window(params);
  if (has_equal_sequences(params)) return prepare_equal(params, batch, window, team, scratch);
  const int seqs = batch.num_seqs + padding_seqs(params);

  int* const first_tile = params.first_tile != nullptr ? params.first_tile : scratch.first_tile;
  if (threadIdx.x == 0) scratch.keys = 0;
  int keys = 0;  // that several tiles read
  const auto tiles_of = [&](int seq) {
    const int tiles = batch.tiles_of(seq);
    if (tiles > 1) keys += min(Sequence(params, seq, batch.num_seqs).k_len, params.keys_in_l2);
    return tiles;
  };
  int tiles = team.prefix_sum(seqs, tiles_of, first_tile).sum;
  if (keys > 0) atomicAdd(&scratch.keys, keys);
  // Lengths that lie end to end add up to what there is room for; what else may come does not get through.
  // Documents are many, with tiles that overlap, of which those that hold some of their queries count.
  if (params.q_spans.step != kDocumentStep) tiles = min(tiles, params.max_items - params.max_partials);
  scratch.counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) scratch.partials = scratch.split_tiles = 0;
  __syncthreads();
  const auto item_of = [&](int tile) {
    int low = 0, high = seqs;  // the last sequence that has no more tiles in front of it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_tile[middle] <= tile ? low : high) = middle;
    }
    return batch.item(window, low, tile - first_tile[low]);
  };
  team.each(tiles, [&](int tile) {
    const WorkItem item = item_of(tile);
    if (item.tokens > 0) atomicAdd(&scratch.counts[bucket_of(item.num_keys)], 1);
  });
  const auto load_of = [&](int bucket) { return scratch.counts[bucket] * keys_of(bucket); };
  const int work = team.prefix_sum(kBuckets, load_of, scratch.starts).sum;
  const auto length_of = [&](int bucket) { return scratch.counts[bucket] > 0 ? keys_of(bucket) : 0; };
  int longest = max(team.prefix_sum(kBuckets, length_of, scratch.starts).most, 1);
  const int together = together_of(params, params.num_kv_heads, scratch.keys, work, longest, tiling.ctas);

  bool splits = false;
  if (params.max_partials > 0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int cost = cost_of(params, scratch.counts, ceil_div(longest, warp + 1), tiling.ctas, lane);
    if (lane == 0) scratch.costs[warp] = cost;
    __syncthreads();
    int best = 0;
    for (int i = 1; i < kCandidates; ++i) {
      if (scratch.costs[i] < scratch.costs[best]) best = i;
    }
    longest = ceil_div(longest, best + 1);
    splits = best > 0;
  }
  if (splits) {
    __syncthreads();
    scratch.counts[threadIdx.x] = 0;
    __syncthreads();
    team.each(tiles, [&](int tile) {
      const WorkItem item = item_of(tile);
      if (item.tokens == 0) return;
      const int keys = item.num_keys, parts = parts_of(keys, longest);
      for (int part = 0; part < parts; ++part) {
        atomicAdd(&scratch.counts[bucket_of((part + 1) * keys / parts - part * keys / parts)], 1);
      }
    });
  }
  const int items =
      team.prefix_sum(kBuckets, [&](int bucket) { return scratch.counts[bucket]; }, scratch.starts).sum;
  __syncthreads();
  team.each(tiles, [&](int tile) {
    const WorkItem whole = item_of(tile);
    if (whole.tokens == 0) return;
    const int keys = whole.num_keys;
    const int parts = splits ? parts_of(keys, longest) : 1;
    int partial = -1;
    if (parts > 1) {
      partial = atomicAdd(&scratch.partials, parts);
      params.split_tiles[atomicAdd(&scratch.split_tiles, 1)] = {whole.seq, whole.token, whole.tokens, partial,
                                                                parts};
    }
    for (int part = 0; part < parts; ++part) {
      WorkItem item = whole;
      item.first_key += part * keys / parts;
      item.num_keys = (part + 1) * keys / parts - part * keys / parts;
      item.partial = parts > 1 ? partial + part : -1;
      params.items[atomicAdd(&scratch.starts[bucket_of(item.num_keys)], 1)] = item;
    }
  });
  if (threadIdx.x == 0) *params.counters = {0, items, scratch.split_tiles, together};
}

}  // namespace pallas_attn::attention
