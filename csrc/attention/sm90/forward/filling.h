// The buffers of keys, or of values, from the side that fills them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/sm90/forward/smem_plan.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape, Role kRole>
class Filling {
 public:
  static constexpr bool kOfKeys = kRole == Role::kKeys;
  static constexpr int kStages = kOfKeys ? Shape::kKeyStages : Shape::kValueStages;
  using Plan = SmemPlan<Shape>;
  using Buffer = std::conditional_t<kOfKeys, typename Plan::Keys, typename Plan::Values>;

  __device__ explicit Filling(Plan& smem) : smem_(smem) {}

  __device__ Buffer& buffer() {
    if constexpr (kOfKeys) {
      return smem_.sK[stage_];
    } else {
      return smem_.sV[stage_];
    }
  }
  __device__ int stage() const { return stage_; }
  __device__ uint64_t* full() { return &ring().full[stage_][0]; }
  __device__ void wait_until_empty() { ptx::mbarrier_wait(&ring().empty[stage_][0], phases_.empty(stage_)); }
  __device__ void advance() { sm90::advance(stage_, phases_); }

 private:
  __device__ auto& ring() {
    if constexpr (kOfKeys) {
      return smem_.keys;
    } else {
      return smem_.values;
    }
  }

  Plan& smem_;
  Phases<kStages> phases_;
  int stage_ = 0;
};

// Words in place of the rows that lead to pages which are not there. NaN in keys: scores are NaN, so is the
// result of whoever sees it. Of the rows from `first` on, those that `bad` names, a bit for every 32nd from
// the lane's own.
template <int kRows, int kPieces, bool kWoven>
__device__ __forceinline__ void fill_rows(KeyTile<kRows, kPieces, kWoven>& buffer, int first, uint32_t bad,
                                          int lane, uint32_t word) {
  for (; bad != 0; bad &= bad - 1) {
    const int row = first + (__ffs(bad) - 1) * 32 + lane;
    for (int piece = 0; piece < kPieces; ++piece) {
      uint4* chunks = static_cast<uint4*>(buffer.row_of(piece, row));
      for (uint32_t i = 0; i < kRowBytes / 16; ++i) chunks[i] = make_uint4(word, word, word, word);
    }
  }
}

// A warp's way through the tiles that it is told of: loader.load(tile) for each.
template <typename Plan, typename Loader>
__device__ __forceinline__ void load_tiles(Plan& smem, int lane, Loader&& loader) {
  Phases<kToldTiles> phases;
  for (int told = 0;; told = next_told(told)) {
    ptx::mbarrier_wait(&smem.told.full[told][0], phases.full(told));
    phases.advance(told);
    const auto& tile = smem.tiles[told];
    if (tile.kv_head < 0) return;
    loader.load(tile);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.told.empty[told][0]);
  }
}

}  // namespace pallas_attn::attention::sm90
