// Documents of one row of a batch, by one CTA. Neighbours with the same id are a run; a hash table finds runs
// that have an id in common. Packed documents are few runs, so that what is done for tokens is what takes
// time: two passes that find runs, and one that tells tokens their ranks. As many runs as tokens are right,
// too.
#pragma once

#include <climits>
#include <cstdint>

#include "attention/documents/documents.h"
#include "attention/params.h"
#include "common/block_team.h"
#include "common/load.h"
#include "common/math.h"

namespace pallas_attn::attention {

constexpr int kDocumentsThreads = 1024;
constexpr int kDocumentsAhead = 8;  // tokens of a thread whose loads are under way at a time

class DocumentFinder {
  static constexpr int kWarps = kDocumentsThreads / 32;
  using Team = BlockTeam<kDocumentsThreads, false>;

 public:
  struct Scratch {
    Team::Scratch team;
    int runs[kWarps], runs_before[kWarps];
  };

  __device__ DocumentFinder(const DocumentsParams& params, int row, Scratch& scratch)
      : params_(params), team_(scratch.team), scratch_(scratch), tokens_(params.q_len + params.k_len) {
    q_ids_ = params.q_ids + int64_t{row} * params.q_len;
    k_ids_ = params.k_ids + int64_t{row} * params.k_len;
    ranks_[0] = params.q_ranks + int64_t{row} * params.q_len;
    ranks_[1] = params.k_ranks + int64_t{row} * params.k_len;
    tables_[0] = params.q_table + int64_t{row} * tokens_ * kDocumentStep;
    tables_[1] = params.k_table + int64_t{row} * tokens_ * kDocumentStep;
    starts_ = params.scratch + row * documents_scratch(tokens_);
    homes_ = starts_ + tokens_ + 1;
    numbers_ = homes_ + tokens_;
    slots_ = numbers_ + tokens_;
  }

  __device__ void find() {
    const int runs = find_runs();
    int slots = kLeastSlots;
    while (slots < 2 * runs) slots *= 2;
    team_.each(slots, [&](int slot) { slots_[slot] = kNone; });
    for (int side = 0; side < sides(); ++side) {
      team_.each_at_last(kDocumentStep * tokens_, [&](int word) { tables_[side][word] = 0; });
    }
    team_.each(runs, [&](int run) { homes_[run] = home_of(run, slots - 1); });
    const auto is_first = [&](int run) { return slots_[homes_[run]] == run; };
    const int documents = team_.prefix_sum(runs, is_first, numbers_).sum;
    for (int side = 0; side < sides(); ++side) {
      team_.each_at_last(documents, [&](int rank) { tables_[side][rank * kDocumentStep] = INT_MAX; });
    }
    __syncthreads();
    team_.each(runs, [&](int run) { homes_[run] = enter(run, numbers_[slots_[homes_[run]]]); });
    for (int side = 0; side < sides(); ++side) {
      team_.each_at_last(documents, [&](int rank) { close(tables_[side] + rank * kDocumentStep); });
    }
    tell_tokens();
  }

 private:
  static constexpr int kNone = INT_MAX;  // behind all runs

  __device__ int sides() const { return params_.k_ids == nullptr ? 1 : 2; }
  __device__ int side_of(int token) const { return token >= params_.q_len; }
  __device__ int id(int token) const {
    return token < params_.q_len ? load_constant(q_ids_ + token)
                                 : load_constant(k_ids_ + token - params_.q_len);
  }
  __device__ bool begins(int token) const {
    return token == 0 || token == params_.q_len || id(token) != id(token - 1);
  }
  __device__ int* rank_of(int token) const {
    return token < params_.q_len ? ranks_[0] + token : ranks_[1] + token - params_.q_len;
  }

  // How many there are. Where they start, and as `rank_of` each token's run. Every warp has a part of the
  // tokens.
  __device__ int find_runs() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = ceil_div(ceil_div(tokens_, kWarps), 32) * 32;
    const int first = warp * part, end = min(first + part, tokens_);
    int runs = 0;
#pragma unroll kDocumentsAhead
    for (int base = first; base < end; base += 32) {
      const int token = base + lane;
      runs += __popc(__ballot_sync(~0u, token < end && begins(token)));
    }
    if (lane == 0) scratch_.runs[warp] = runs;
    __syncthreads();
    const auto runs_of = [&](int i) { return scratch_.runs[i]; };
    const int all = team_.prefix_sum(kWarps, runs_of, scratch_.runs_before).sum;
    __syncthreads();
    runs = scratch_.runs_before[warp];
#pragma unroll kDocumentsAhead
    for (int base = first; base < end; base += 32) {
      const int token = base + lane;
      const bool starts = token < end && begins(token);
      const uint32_t those = __ballot_sync(~0u, starts);
      const int run = runs + __popc(those & (~0u >> (31 - lane))) - 1;
      runs += __popc(those);
      if (token < end) *rank_of(token) = run;
      if (starts) starts_[run] = token;
    }
    if (threadIdx.x == 0) starts_[all] = tokens_;
    __syncthreads();
    return all;
  }

  // The slot of the run's id: it has the first run with that id. Which slot it is hangs on who comes first.
  __device__ int home_of(int run, uint32_t mask) const {
    const int own = id(starts_[run]);
    for (uint32_t slot = scattered(own) & mask;; slot = (slot + 1) & mask) {
      const int other = atomicCAS(slots_ + slot, kNone, run);
      if (other != kNone && id(starts_[other]) != own) continue;
      atomicMin(slots_ + slot, run);
      return static_cast<int>(slot);
    }
  }
  // Neighbouring ids far apart: each bit of a number changes half of the bits of the result.
  static __device__ uint32_t scattered(uint32_t id) {
    id = (id ^ id >> 16) * 0x7feb352du;
    id = (id ^ id >> 15) * 0x846ca68bu;
    return id ^ id >> 16;
  }

  // A run's tokens count for its document. Returns `rank`.
  __device__ int enter(int run, int rank) const {
    const int side = side_of(starts_[run]), before = side == 0 ? 0 : params_.q_len;
    const int begin = starts_[run] - before, end = starts_[run + 1] - before;
    int* const row = tables_[side] + rank * kDocumentStep;
    atomicMin(row, begin);
    atomicMax(row + 1, end);
    atomicAdd(row + 2, end - begin);
    return rank;
  }
  // The third word, the number of its tokens, becomes whether they are all between its first and its last.
  static __device__ void close(int* row) {
    if (row[1] == 0) row[0] = 0;
    row[2] = row[1] - row[0] == row[2];
  }

  __device__ void tell_tokens() const {
    for (int base = threadIdx.x; base < tokens_; base += kDocumentsThreads * kDocumentsAhead) {
      int ranks[kDocumentsAhead];
#pragma unroll
      for (int i = 0; i < kDocumentsAhead; ++i) {
        ranks[i] = *rank_of(min(base + i * kDocumentsThreads, tokens_ - 1));
      }
#pragma unroll
      for (int i = 0; i < kDocumentsAhead; ++i) ranks[i] = homes_[ranks[i]];
#pragma unroll
      for (int i = 0; i < kDocumentsAhead; ++i) {
        const int token = base + i * kDocumentsThreads;
        if (token < tokens_) *rank_of(token) = ranks[i];
      }
    }
  }

  const DocumentsParams& params_;
  const Team team_;
  Scratch& scratch_;
  const int tokens_;
  const int *q_ids_, *k_ids_;
  int *ranks_[2], *tables_[2];
  // Of runs: the first token; the slot of its id, then its rank; the documents in front of it.
  int *starts_, *homes_, *numbers_;
  int* slots_;  // each the first run of an id
};

}  // namespace pallas_attn::attention
