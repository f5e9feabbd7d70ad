// A warp that has the copy engine fetch the keys of one tile after the other, or the values.
#pragma once

#include "blocksparse/params.h"
#include "blocksparse/sm90/maps.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::blocksparse::sm90 {

template <int kStages>
class Loader {
 public:
  using Buffers = SmemPlan::Piece[kStages][kPieces];

  __device__ Loader(const PrefillParams& params, SmemPlan& smem, const CUtensorMap& map, Buffers& buffers,
                    Ring<kStages, 1, 1>& ring, int lane)
      : params_(params), smem_(smem), map_(map), buffers_(buffers), ring_(ring), lane_(lane) {}

  __device__ void work() {
    const uint64_t policy = ptx::l2_evict_last_policy();
    Phases<kSlots> tile_phases;
    for (int slot = 0;; slot = next_slot(slot)) {
      ptx::mbarrier_wait(&smem_.told.full[slot][0], tile_phases.full(slot));
      tile_phases.advance(slot);
      const Tile& tile = smem_.tiles[slot];
      if (tile.head < 0) return;
      load(tile, smem_.columns[slot][lane_], policy);
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.empty[slot][0]);
    }
  }

 private:
  // `held`: the column of this lane's entry, of tile.entry and those before it.
  __device__ void load(const Tile& tile, int held, uint64_t policy) {
    const int kv_head = tile.head / (params_.num_heads / params_.num_kv_heads);
    const int64_t head = params_.layout_heads > 1 ? tile.head : 0;
    const int* columns = params_.columns + head * params_.num_columns;
    const int parts = 1 << (params_.block_shift - kTileShift);
    int entry = tile.entry, part = tile.part, first = entry;
    const int key_token = tile.key_token, num_keys = tile.num_keys;
    for (int i = 0; i < num_keys; ++i) {
      if (first - entry == 32) {
        first = entry;
        held = __ldg(columns + max(entry - lane_, 0));
      }
      const int column = __shfl_sync(0xffffffff, held, first - entry);
      const int token = key_token + (column << params_.block_shift) + (part << kTileShift);
      ptx::mbarrier_wait(&ring_.empty[stage_][0], phases_.empty(stage_));
      if (lane_ == 0) load_tile(buffers_[stage_], map_, &ring_.full[stage_][0], policy, kv_head, token);
      phases_.advance(stage_);
      stage_ = (stage_ + 1) % kStages;
      if (part-- == 0) {
        part = parts - 1;
        --entry;
      }
    }
  }

  const PrefillParams& params_;
  SmemPlan& smem_;
  const CUtensorMap& map_;
  Buffers& buffers_;
  Ring<kStages, 1, 1>& ring_;
  const int lane_;
  Phases<kStages> phases_;
  int stage_ = 0;
};

}  // namespace pallas_attn::blocksparse::sm90
