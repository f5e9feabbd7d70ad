// From lengths to work items, by one CTA.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/prepare/buckets.h"
#include "attention/prepare/prepare.h"
#include "attention/prepare/together.h"
#include "attention/rules.h"
#include "common/block_team.h"
#include "common/math.h"

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
  int work, longest;  // key tiles of all tiles of queries, and of the longest
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

// Whether another kernel serves the sequence.
__device__ bool is_others(const ForwardParams& params, const Sequence& sequence, int seq) {
  if (sequence.q_len * params.group <= params.skip_rows) return true;
  return params.taken != nullptr && load_constant(params.taken + seq) != 0;
}

// How long the call takes if no part has more than `longest` key tiles, by one warp: CTAs share the work
// evenly, unless parts are so long that two of them make the longest run.
__device__ int cost_of(const ForwardParams& params, const int* counts, int longest, int ctas, int lane) {
  int work = 0, long_parts = 0, partials = 0;
#pragma unroll 1
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
  const int whole = work / ctas, even = whole * heads + (work - whole * ctas) * heads / ctas;
  return max(even, ceil_div(long_parts * heads, ctas) * (longest + kItemCost)) +
         (partials > 0 ? kMergeCost : 0);
}

// How many parts the longest tile is in where the call takes least.
__device__ int least_cost_parts(const ForwardParams& params, Scratch& scratch, int longest, int ctas) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cost = cost_of(params, scratch.counts, ceil_div(longest, warp + 1), ctas, lane);
  if (lane == 0) scratch.costs[warp] = cost;
  __syncthreads();
  const int of_lane = scratch.costs[lane];
  return __ffs(__ballot_sync(~0u, of_lane == __reduce_min_sync(~0u, of_lane)));
}

// The kernel runs once a call, and its instructions take longer to come than to run: tiles are looked at two
// or three times by the same ones.
__device__ __forceinline__ void prepare(const ForwardParams& params, const Tiling& tiling, Scratch& scratch) {
  const Team team(scratch.team);
  const Batch batch = {params, tiling, num_seqs_now(params)};
  const Window window(params);
  const int seqs = batch.num_seqs + padding_seqs(params);

  int* const first_tile = params.first_tile != nullptr ? params.first_tile : scratch.first_tile;
  scratch.counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    scratch.work = scratch.longest = scratch.keys = scratch.partials = scratch.split_tiles = 0;
  }
  int keys = 0;  // that several tiles read
  const auto tiles_of = [&](int seq) {
    const Sequence sequence(params, seq, batch.num_seqs);
    if (!sequence.padding && is_others(params, sequence, seq)) return 0;
    const int tiles = ceil_div(sequence.q_len, tiling.tokens);
    if (tiles > 1) keys += min(sequence.k_len, params.keys_in_l2);
    return tiles;
  };
  int tiles = team.prefix_sum(seqs, tiles_of, first_tile).sum;
  // Lengths that lie end to end add up to what there is room for; what else may come does not get through.
  // Documents with ranks are many, with tiles that overlap, of which those that hold some of their queries
  // count.
  if (params.q_ranks == nullptr) tiles = min(tiles, params.max_items - params.max_partials);
  __syncthreads();
  if (keys > 0) atomicAdd(&scratch.keys, keys);

  enum { kCount, kCountParts, kWrite } pass = kCount;
  int longest = keys_of(0);  // key tiles of a part
  int together = 0, items = 0;
#pragma unroll 1
  for (;;) {
    int work = 0, most = 0;
    team.each(tiles, [&](int tile) {
      const int seq = last_up_to(first_tile, seqs, tile);
      const WorkItem whole = batch.item(window, seq, tile - first_tile[seq]);
      if (whole.tokens == 0) return;
      work += whole.num_keys;
      most = max(most, whole.num_keys);
      const int parts = parts_of(whole.num_keys, longest);
      int partial = -1;
      if (pass == kWrite && parts > 1) {
        partial = atomicAdd(&scratch.partials, parts);
        params.split_tiles[atomicAdd(&scratch.split_tiles, 1)] = {whole.seq, whole.token, whole.tokens,
                                                                  partial, parts};
      }
      int begin = 0;
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        const int end = (part + 1) * whole.num_keys / parts;
        WorkItem item = whole;
        item.first_key += begin;
        item.num_keys = end - begin;
        item.partial = parts > 1 ? partial + part : -1;
        begin = end;
        int* const counts = pass == kWrite ? scratch.starts : scratch.counts;
        const int place = atomicAdd(counts + bucket_of(item.num_keys), 1);
        if (pass == kWrite) params.items[place] = item;
      }
    });
    if (pass == kWrite) break;
    if (pass == kCount) {
      work = __reduce_add_sync(~0u, work);
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0 && work > 0) {
        atomicAdd(&scratch.work, work);
        atomicMax(&scratch.longest, most);
      }
      __syncthreads();
      most = max(keys_of(bucket_of(scratch.longest)), 1);
      together = together_of(params, params.num_kv_heads, scratch.keys, scratch.work, most, tiling.ctas);
      const int parts = params.max_partials > 0 ? least_cost_parts(params, scratch, most, tiling.ctas) : 1;
      if (parts > 1) {
        longest = ceil_div(most, parts);
        __syncthreads();
        scratch.counts[threadIdx.x] = 0;
        __syncthreads();
        pass = kCountParts;
        continue;
      }
    }
    items = team.prefix_sum(kBuckets, [&](int bucket) { return scratch.counts[bucket]; }, scratch.starts).sum;
    __syncthreads();
    pass = kWrite;
  }
  if (threadIdx.x == 0) *params.counters = {0, items, scratch.split_tiles, together};
}

}  // namespace pallas_attn::attention
