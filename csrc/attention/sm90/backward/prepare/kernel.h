// The key tiles of all sequences in the order in which they are taken: those of long sequences first, a
// sequence's side by side and its first keys first. One CTA.
#pragma once

#include "attention/sm90/backward/document.h"
#include "attention/sm90/backward/prepare/prepare.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90::backward {

constexpr int kPrepareThreads = 512;
constexpr int kBuckets = 128;

struct PrepareScratch {
  int tiles[kBuckets];  // of sequences about as long; then where the next such sequence's begin
  int turns;
};

// Of tiles that a sequence takes: two buckets for each power of two, the longest first.
__device__ __forceinline__ int bucket_of(int tiles) {
  const int power = highest_bit(max(tiles, 1));
  const int upper = power > 0 ? tiles >> (power - 1) & 1 : 0;
  return kBuckets - 1 - (power * 2 + upper);
}

__device__ __forceinline__ void prepare(const BackwardParams& params, const Tiling& tiling,
                                        PrepareScratch& scratch) {
  const int thread = threadIdx.x;
  if (thread < kBuckets) scratch.tiles[thread] = 0;
  if (thread == 0) scratch.turns = 0;
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  const int seqs = num_seqs(params);
  __syncthreads();
  for (int seq = thread; seq < seqs; seq += kPrepareThreads) {
    const int tiles = ceil_div(Document(params, seq, seqs).k_len, tiling.keys);
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
    *params.counters = {0, before};
  }
  __syncthreads();
  for (int seq = thread; seq < seqs; seq += kPrepareThreads) {
    const Document document(params, seq, seqs);
    const int tiles = ceil_div(document.k_len, tiling.keys);
    if (tiles == 0) continue;
    const int turn = atomicAdd(&scratch.turns, ceil_div(document.q_len, tiling.queries));
    const int first = atomicAdd(&scratch.tiles[bucket_of(tiles)], tiles);
    for (int i = 0; i < tiles; ++i) params.tiles[first + i] = {seq, i, turn};
  }
  __syncthreads();
  const int turns = scratch.turns * params.num_heads;
  for (int i = thread; i < turns; i += kPrepareThreads) params.turns[i] = 0;
}

}  // namespace pallas_attn::attention::sm90::backward
