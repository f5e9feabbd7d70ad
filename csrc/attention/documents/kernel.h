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
constexpr int kDocumentsAhead = 8;  // tokens of a thread whose ids are loaded at a time

class DocumentFinder {
  static constexpr int kWarps = kDocumentsThreads / 32;
  using Team = BlockTeam<kDocumentsThreads, false>;

  // Queries or keys of the row.
  struct Side {
    const int* ids;
    int *ranks, *table;
    int tokens;
  };

 public:
  struct Scratch {
    Team::Scratch team;
    int runs[kWarps], runs_before[2][kWarps];
  };

  __device__ DocumentFinder(const DocumentsParams& params, int row, Scratch& scratch)
      : team_(scratch.team), scratch_(scratch), tokens_(params.q_len + params.k_len), q_len_(params.q_len) {
    const int64_t ranks = int64_t{row} * tokens_;
    const auto side = [&](const int* ids, int* of_tokens, int* table, int tokens) {
      const int64_t first = int64_t{row} * tokens;
      return Side{ids + first, of_tokens + first, table + ranks * kDocumentStep, tokens};
    };
    sides_[0] = side(params.q_ids, params.q_ranks, params.q_table, params.q_len);
    sides_[1] = side(params.k_ids, params.k_ranks, params.k_table, params.k_len);
    starts_ = params.scratch + row * documents_scratch(tokens_);
    homes_ = starts_ + tokens_ + 1;
    numbers_ = homes_ + tokens_;
    slots_ = numbers_ + tokens_;
  }

  __device__ void find() {
    each_side([&](const Side& side, int) { clear(side.table, kDocumentStep * tokens_); });
    int firsts[2], runs = 0;
    each_side([&](const Side& side, int which) {
      firsts[which] = runs;
      runs += find_runs(side, which, runs);
    });
    if (threadIdx.x == 0) starts_[runs] = tokens_;
    int slots = kLeastSlots;
    while (slots < 2 * runs) slots *= 2;
    team_.each(slots, [&](int slot) { slots_[slot] = kNone; });
    team_.each(runs, [&](int run) { homes_[run] = home_of(run, slots - 1); });
    const auto is_first = [&](int run) { return slots_[homes_[run]] == run; };
    const int documents = team_.prefix_sum(runs, is_first, numbers_).sum;
    each_side([&](const Side& side, int) {
      team_.each_at_last(documents, [&](int rank) { side.table[rank * kDocumentStep] = INT_MAX; });
    });
    __syncthreads();
    team_.each(runs, [&](int run) { homes_[run] = enter(run, numbers_[slots_[homes_[run]]]); });
    each_side([&](const Side& side, int which) {
      team_.each_at_last(documents, [&](int rank) { close(side.table + rank * kDocumentStep); });
      each_token(side, firsts[which] + scratch_.runs_before[which][threadIdx.x / 32],
                 [&](int token, int run, bool, int) { side.ranks[token] = homes_[run]; });
    });
  }

 private:
  static constexpr int kNone = INT_MAX;  // behind all runs

  template <typename Work>
  __device__ void each_side(Work work) const {
    work(sides_[0], 0);
    if (sides_[1].tokens > 0) work(sides_[1], 1);
  }

  static __device__ void clear(int* words, int count) {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kDocumentsThreads) words[i] = 0;
  }

  // work(token, its run, whether it starts it, its id) for the warp's part of the tokens, which has `runs` in
  // front of it. Returns those up to its end.
  template <typename Work>
  static __device__ int each_token(const Side& side, int runs, Work work) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = ceil_div(ceil_div(side.tokens, kWarps), 32) * 32;
    const int end = min((warp + 1) * part, side.tokens);
    for (int base = warp * part + lane; base - lane < end; base += 32 * kDocumentsAhead) {
      int ids[kDocumentsAhead], before[kDocumentsAhead];
#pragma unroll
      for (int i = 0; i < kDocumentsAhead; ++i) {
        const int token = min(base + 32 * i, end - 1);
        ids[i] = load_constant(side.ids + token);
        before[i] = load_constant(side.ids + max(token - 1, 0));
      }
#pragma unroll
      for (int i = 0; i < kDocumentsAhead; ++i) {
        const int token = base + 32 * i;
        const bool starts = token < end && (token == 0 || ids[i] != before[i]);
        const uint32_t those = __ballot_sync(~0u, starts);
        if (token < end) work(token, runs + __popc(those & (~0u >> (31 - lane))) - 1, starts, ids[i]);
        runs += __popc(those);
      }
    }
    return runs;
  }

  // How many a side has. Where they start, and as `numbers_` their ids; `first`: runs of the other side.
  __device__ int find_runs(const Side& side, int which, int first) const {
    const int warp = threadIdx.x / 32;
    const int own = each_token(side, 0, [](int, int, bool, int) {});
    if (threadIdx.x % 32 == 0) scratch_.runs[warp] = own;
    __syncthreads();
    const auto runs_of = [&](int i) { return scratch_.runs[i]; };
    const int all = team_.prefix_sum(kWarps, runs_of, scratch_.runs_before[which]).sum;
    __syncthreads();
    each_token(side, first + scratch_.runs_before[which][warp], [&](int token, int run, bool starts, int id) {
      if (!starts) return;
      starts_[run] = token + which * q_len_;
      numbers_[run] = id;
    });
    return all;
  }

  // The slot of the run's id: it has the first run with that id. Which slot it is hangs on who comes first.
  __device__ int home_of(int run, uint32_t mask) const {
    const int own = numbers_[run];
    for (uint32_t slot = scattered(own) & mask;; slot = (slot + 1) & mask) {
      const int other = atomicCAS(slots_ + slot, kNone, run);
      if (other != kNone && numbers_[other] != own) continue;
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
    const int start = starts_[run], which = start >= q_len_, before = which * q_len_;
    const int begin = start - before, end = starts_[run + 1] - before;
    int* const row = sides_[which].table + rank * kDocumentStep;
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

  const Team team_;
  Scratch& scratch_;
  const int tokens_, q_len_;
  Side sides_[2];
  // Of runs: the first token; the slot of its id, then its rank; its id, then the documents in front of it.
  int *starts_, *homes_, *numbers_;
  int* slots_;  // each the first run of an id
};

}  // namespace pallas_attn::attention
