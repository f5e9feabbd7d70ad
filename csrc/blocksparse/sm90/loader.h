// The warp that has the copy engine fetch a tile's queries, and its keys and values in turn.
#pragma once

#include <cuda.h>

#include "blocksparse/params.h"
#include "blocksparse/sm90/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::blocksparse::sm90 {

struct Maps {
  CUtensorMap query, key, value;
};

class Loader {
 public:
  __device__ Loader(const PrefillParams& params, const Maps& maps, SmemPlan& smem, int lane)
      : params_(params), maps_(maps), smem_(smem), lane_(lane) {}

  __device__ void work() {
    const uint64_t once = ptx::l2_evict_first_policy(), again = ptx::l2_evict_last_policy();
    Phases<kSlots> tile_phases;
    for (int slot = 0;; slot = next_slot(slot)) {
      ptx::mbarrier_wait(&smem_.told.full[slot][0], tile_phases.full(slot));
      tile_phases.advance(slot);
      const Tile& tile = smem_.tiles[slot];
      if (tile.head < 0) return;
      if (lane_ == 0) {
        load(smem_.sQ[slot], maps_.query, &smem_.query_full[slot], once, tile.head, tile.token);
      }
      load_keys(tile, again);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.empty[slot][0]);
    }
  }

 private:
  __device__ void load_keys(const Tile& tile, uint64_t policy) {
    const int kv_head = tile.head / (params_.num_heads / params_.num_kv_heads);
    const int64_t head = params_.layout_heads > 1 ? tile.head : 0;
    const int* columns = params_.columns + head * params_.num_columns;
    const int parts = 1 << (params_.block_shift - kTileShift);
    int entry = tile.entry, part = tile.part;
    int first = entry, held = tile.columns[lane_];  // of entries first, first - 1, ...
    const int key_token = tile.key_token, num_keys = tile.num_keys;
    for (int i = 0; i < num_keys; ++i) {
      if (first - entry == 32) {
        first = entry;
        held = __ldg(columns + max(entry - lane_, 0));
      }
      const int column = __shfl_sync(0xffffffff, held, first - entry);
      const int token = key_token + (column << params_.block_shift) + (part << kTileShift);
      ptx::mbarrier_wait(&smem_.keys.empty[stage_][0], phases_.empty(stage_));
      if (lane_ == 0) {
        load(smem_.sK[stage_], maps_.key, &smem_.keys.full[stage_][0], policy, kv_head, token);
      }
      ptx::mbarrier_wait(&smem_.values.empty[stage_][0], phases_.empty(stage_));
      if (lane_ == 0) {
        load(smem_.sV[stage_], maps_.value, &smem_.values.full[stage_][0], policy, kv_head, token);
      }
      phases_.advance(stage_);
      stage_ = (stage_ + 1) % kStages;
      if (part-- == 0) {
        part = parts - 1;
        --entry;
      }
    }
  }

  // What lies outside of the array reads as zero.
  __device__ static void load(SmemPlan::Piece (&to)[kPieces], const CUtensorMap& map, uint64_t* full,
                              uint64_t policy, int head, int token) {
    ptx::mbarrier_arrive_expect_bytes(full, kTileBytes);
    for (int piece = 0; piece < kPieces; ++piece) {
      ptx::tma_load_3d(to[piece], &map, full, policy, piece * kPieceDims, head, token);
    }
  }

  const PrefillParams& params_;
  const Maps& maps_;
  SmemPlan& smem_;
  const int lane_;
  Phases<kStages> phases_;
  int stage_ = 0;
};

}  // namespace pallas_attn::blocksparse::sm90
