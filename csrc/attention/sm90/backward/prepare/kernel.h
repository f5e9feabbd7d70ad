// The tiles of all sequences in the order in which they are taken: those of long sequences first, a
// sequence's side by side; its first keys first, and its last queries. A CTA for each list; where sums are
// added in memory, others zero the turns.
#pragma once

#include "attention/sm90/backward/document.h"
#include "attention/sm90/backward/prepare/prepare.h"
#include "attention/sm90/backward/tile_list.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90::backward {

constexpr int kPrepareThreads = 512;
constexpr int kZeroingBlocks = 16;
constexpr int kBuckets = 128;

struct PrepareScratch {
  int tiles[kBuckets];  // of sequences about as long; then where the next such sequence's begin
};

// Of tiles that a sequence takes: two buckets for each power of two, the longest first.
__device__ __forceinline__ int bucket_of(int tiles) {
  const int power = highest_bit(max(tiles, 1));
  const int upper = power > 0 ? tiles >> (power - 1) & 1 : 0;
  return kBuckets - 1 - (power * 2 + upper);
}

// Visits the numbers of a sequence's tiles in which it has tokens: visit(number, the one before). How many.
template <Side kSide, typename Visit>
__device__ __forceinline__ int each_listed(const BackwardParams& params, const Document& document, int rows,
                                           Visit visit) {
  constexpr bool kKeys = kSide == Side::kKeys;
  const int lead = !kKeys && params.rows_of_queries.pointers != nullptr ? document.lead(rows) : 0;
  const int length = kKeys ? document.k_len : document.q_len + lead;
  const bool mixed = kKeys ? document.k_mixed : document.q_mixed;
  const int* ranks = kKeys ? params.k_ranks + int64_t{document.batch} * params.kv_len + document.key
                           : params.q_ranks + int64_t{document.batch} * params.q_len + document.query;
  int count = 0, before = -1;
  for (int number = 0; number * rows < length; ++number) {
    const int end = min(number * rows + rows, length);
    int i = number * rows;
    while (mixed && i < end && load_constant(ranks + i) != document.rank) ++i;
    if (i == end) continue;
    visit(number, before);
    before = number;
    ++count;
  }
  return count;
}

template <Side kSide>
__device__ __forceinline__ void list_tiles(const BackwardParams& params, int rows, PrepareScratch& scratch) {
  const int thread = threadIdx.x, seqs = num_seqs(params);
  ListedTile* const list = kSide == Side::kKeys ? params.key_tiles : params.query_tiles;
  if (thread < kBuckets) scratch.tiles[thread] = 0;
  __syncthreads();
  for (int seq = thread; seq < seqs; seq += kPrepareThreads) {
    const int tiles = each_listed<kSide>(params, Document(params, seq, seqs), rows, [](int, int) {});
    if (tiles > 0) atomicAdd(&scratch.tiles[bucket_of(tiles)], tiles);
  }
  __syncthreads();
  if (thread == 0) {
    int before = 0;
    for (int& tiles : scratch.tiles) {
      const int here = tiles;
      tiles = before;
      before += here;
    }
    // Passes that hold keys have the first counters.
    const int begin = kSide == Side::kKeys ? 0 : kMostPasses - 1;
    const int end = kSide == Side::kKeys ? kMostPasses - 1 : kMostPasses;
    for (int pass = begin; pass < end; ++pass) params.counters[pass] = {0, before};
  }
  __syncthreads();
  for (int seq = thread; seq < seqs; seq += kPrepareThreads) {
    const Document document(params, seq, seqs);
    const int tiles = each_listed<kSide>(params, document, rows, [](int, int) {});
    if (tiles == 0) continue;
    int at = atomicAdd(&scratch.tiles[bucket_of(tiles)], tiles);
    const int step = kSide == Side::kKeys ? 1 : -1;
    if (step < 0) at += tiles - 1;
    each_listed<kSide>(params, document, rows, [&](int number, int before) {
      list[at] = {seq, number, before};
      at += step;
    });
  }
}

__device__ __forceinline__ void prepare(const BackwardParams& params, const Tiling& tiling,
                                        PrepareScratch& scratch) {
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  const int block = ptx::block_x();
  if (block == 0) return list_tiles<Side::kKeys>(params, tiling.keys, scratch);
  if (tiling.queries > 0) return list_tiles<Side::kQueries>(params, tiling.queries, scratch);
  const int64_t turns = int64_t{params.batch} * params.q_len * params.num_heads;
  const int64_t first = int64_t{block - 1} * kPrepareThreads + threadIdx.x;
  for (int64_t i = first; i < turns; i += kZeroingBlocks * kPrepareThreads) params.turns[i] = 0;
}

}  // namespace pallas_attn::attention::sm90::backward
