// The warp that goes ahead: takes the next tile, finds whose queries it holds and what they see, and tells
// the others, and has the tile's queries fetched. It is up to two tiles ahead of them, so that nobody waits
// for the loads that this takes, which depend on each other. What sees nothing it answers itself.
//
// Tiles are taken from a counter, so that no CTA is left with the long ones; a tile's result does not depend
// on who took it. In the order of the counter: heads that are to go together, later positions before earlier
// ones, which see less, groups of heads. Sequence i has the items from cu_q_lens[i] / 128 + 2 * i on, two
// more than its queries fill, since its first and last tiles may be partial.
#pragma once

#include <cmath>
#include <cstdint>

#include "blocksparse/params.h"
#include "blocksparse/sm90/maps.h"
#include "common/math.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::blocksparse::sm90 {

class Scout {
 public:
  __device__ Scout(const PrefillParams& params, const Maps& maps, SmemPlan& smem, int lane)
      : params_(params), maps_(maps), smem_(smem), lane_(lane) {}

  __device__ void work() {
    const int items = num_items(params_);
    const int total = items * params_.num_heads;
    const uint64_t policy = ptx::l2_evict_first_policy();
    Phases<kSlots> phases;
    int slot = 0;
    for (int index = blockIdx.x;;) {
      // On its way while this tile is looked at.
      int taken = 0;
      if (lane_ == 0) taken = ptx::fetch_and_increment(params_.taken);
      Tile tile;
      tile.head = -1;
      int column = 0;
      if (index >= total || find(index, items, tile, column)) {
        ptx::mbarrier_wait(&smem_.told.empty[slot][0], phases.empty(slot));
        smem_.columns[slot][lane_] = column;
        if (lane_ == 0) smem_.tiles[slot] = tile;
        __syncwarp();
        if (lane_ == 0) {
          ptx::mbarrier_arrive(&smem_.told.full[slot][0]);
          if (tile.head >= 0) {
            load_tile(smem_.sQ[slot], maps_.query, &smem_.query_full[slot], policy, tile.head, tile.token);
          }
        }
        phases.advance(slot);
        slot = next_slot(slot);
        if (index >= total) return;
      }
      index = gridDim.x + __shfl_sync(0xffffffff, taken, 0);
    }
  }

  static PALLAS_ATTN_HOST_DEVICE int num_items(const PrefillParams& params) {
    return params.num_tokens / kTileQueries + 2 * params.num_seqs + 1;
  }

 private:
  // Whether the tile has queries that see something; `column`: of the entry that is this lane's.
  __device__ bool find(int index, int items, Tile& tile, int& column) const {
    const int together = params_.heads_together;
    const int turn = index / together;
    const int item = items - 1 - turn % items;
    tile.head = turn / items * together + index % together;

    const int seq = sequence_of(item);
    // Tokens behind the last sequence are those of one more, which has no keys.
    const bool padding = seq == params_.num_seqs;
    const int own = min(seq, params_.num_seqs - 1), tokens = params_.num_tokens;
    int q_begin = __ldg(params_.cu_q_lens + own), q_end = __ldg(params_.cu_q_lens + own + 1);
    const int k_begin = __ldg(params_.cu_k_lens + own), k_end = __ldg(params_.cu_k_lens + own + 1);
    // The first sequence begins with the first token, whatever stands there.
    if (own == 0) q_begin = 0;
    q_begin = min(max(padding ? q_end : q_begin, 0), tokens);
    q_end = min(max(padding ? tokens : q_end, q_begin), tokens);
    const int q_len = q_end - q_begin;
    if (params_.skip_single && q_len == 1 && !padding) return false;
    // What cannot be right sees nothing, and makes NaN.
    bool bad = !padding && (k_begin < 0 || k_end < k_begin || k_end > params_.num_key_tokens);
    const int k_len = padding || bad ? 0 : k_end - k_begin;

    // Positions: of the first query, and of the tile's first row. Tiles begin at multiples of their size.
    const int oldest = k_len - q_len;
    const int first = (oldest & -kTileQueries) + (item - q_begin / kTileQueries - 2 * seq) * kTileQueries;
    if (first >= k_len || first + kTileQueries <= oldest) return false;
    tile.token = q_begin + first - oldest;
    tile.begin = max(oldest - first, 0);
    tile.end = min(k_len - first, kTileQueries);
    tile.key_token = k_begin;
    tile.num_keys = 0;
    // Positions below 0 are of queries without keys.
    if (first >= 0) bad = !look_up(first, k_len, tile, column);
    if (tile.num_keys > 0) return true;
    answer_nothing(tile, bad);
    return false;
  }

  __device__ int sequence_of(int item) const {
    int before = 0;
    for (int base = 0; base < params_.num_seqs; base += 32) {
      const int seq = base + lane_;
      bool passed = false;
      if (seq < params_.num_seqs) {
        const int end = min(max(__ldg(params_.cu_q_lens + seq + 1), 0), params_.num_tokens);
        passed = end / kTileQueries + 2 * (seq + 1) <= item;
      }
      before += __popc(__ballot_sync(0xffffffff, passed));
    }
    return before;
  }

  // What the layout lists for the queries from position `first` on; false if that cannot be right.
  __device__ bool look_up(int first, int k_len, Tile& tile, int& near) const {
    const int row = first >> params_.q_block_shift;
    if (row >= params_.num_rows) return false;
    const int64_t head = params_.layout_heads > 1 ? tile.head : 0;
    const int* pointers = params_.row_pointers + head * (params_.num_rows + 1) + row;
    const int begin = __ldg(pointers), end = __ldg(pointers + 1);
    if (begin < 0 || end < begin || end > params_.num_columns) return false;
    const int* columns = params_.columns + head * params_.num_columns;
    const int own = first >> params_.block_shift;
    const auto last = static_cast<int>(((static_cast<int64_t>(row + 1) << params_.q_block_shift) - 1) >>
                                       params_.block_shift);
    int past = 0;
    bool lists_own = false, bad = false;
    for (int base = begin; base < end; base += 32) {
      const int entry = base + lane_;
      const bool listed = entry < end;
      const int column = listed ? __ldg(columns + entry) : last + 1;
      const int before = listed && entry > begin ? __ldg(columns + entry - 1) : -1;
      bad |= listed && (column <= before || column > last);
      past += __popc(__ballot_sync(0xffffffff, column < own));
      lists_own |= column == own;
    }
    if (__any_sync(0xffffffff, bad)) return false;
    lists_own = __any_sync(0xffffffff, lists_own);
    const int parts = 1 << (params_.block_shift - kTileShift);
    const int own_part = (first >> kTileShift) & (parts - 1);
    tile.num_keys = past * parts + (lists_own ? own_part + 1 : 0);
    tile.own_keys = lists_own ? min(k_len - first, kTileKeys) : 0;
    tile.entry = begin + past - (lists_own ? 0 : 1);
    tile.part = lists_own ? own_part : parts - 1;
    if (tile.num_keys > 0) near = __ldg(columns + max(tile.entry - lane_, 0));
    return true;
  }

  __device__ void answer_nothing(const Tile& tile, bool bad) const {
    constexpr int kChunks = kHeadDim * 2 / sizeof(uint4);
    // NaN in bf16 and in fp16.
    const uint32_t word = bad ? 0xffffffff : 0;
    auto* out = static_cast<uint4*>(params_.out);
    for (int i = tile.begin * kChunks + lane_; i < tile.end * kChunks; i += 32) {
      const int64_t token = tile.token + i / kChunks;
      out[(token * params_.num_heads + tile.head) * kChunks + i % kChunks] =
          make_uint4(word, word, word, word);
    }
    const float sum = bad ? NAN : -INFINITY;
    for (int row = tile.begin + lane_; row < tile.end; row += 32) {
      params_.lse[static_cast<int64_t>(tile.token + row) * params_.num_heads + tile.head] =
          make_float2(-INFINITY, sum);
    }
  }

  const PrefillParams& params_;
  const Maps& maps_;
  SmemPlan& smem_;
  const int lane_;
};

}  // namespace pallas_attn::blocksparse::sm90
