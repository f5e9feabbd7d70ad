// The warp that goes ahead: takes the next tile, tells the others, and has rows fetched. A tile that meets
// nothing it answers itself.
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/maps.h"
#include "attention/sm90/backward/wide/smem_plan.h"
#include "attention/sm90/backward/wide/steps.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90::backward::wide {

template <typename Pass>
class Loader {
 public:
  using Plan = SmemPlan<Pass>;
  using Steps = StepsOf<Pass>;
  static constexpr uint32_t kNan = 0x7fff7fff;  // twice, in bf16 and in fp16

  __device__ Loader(const BackwardParams& params, const Maps& maps, Plan& smem, int lane)
      : params_(params), maps_(maps), smem_(smem), lane_(lane) {}

  __device__ void work() {
    ptx::wait_for_previous_kernel();
    const TileList<Pass::kSide, kHeld, kMet, Pass::kOfLayout> list(params_, params_.counters + counters(), 1);
    take_tiles(
        list, smem_, lane_,
        [&](int index, Tile& tile, int stage) {
          list.find(index, tile);
          if constexpr (Pass::kListed) {
            if (tile.head >= 0) smem_.steps[stage] = Steps::count(params_, tile);
          }
        },
        [&](const Tile& tile, int stage) {
          if constexpr (Pass::kListed) return smem_.steps[stage] > 0;
          return tile.met.begin < tile.met.end;
        },
        [&](const Tile& tile) { answer_unseen(tile); },
        [&](const Tile& tile, int count) { load(tile, count); });
    ptx::allow_dependent_launch();
  }

 private:
  static constexpr int counters() {
    return Pass::kOf == Gradient::kKeys ? 0 : Pass::kOf == Gradient::kValues ? 1 : 2;
  }

  __device__ void load(const Tile& tile, int count) {
    const int query = tile.query + tile.first, key = tile.key + tile.first;
    const Place<1> held = {count};
    Steps step(params_, tile);
    if constexpr (Pass::kHoldsQueries) {
      fetch(smem_.qk_held, held, smem_.held_qk, maps_.query, tile.head, query, tile.batch);
      load_qk(tile, step);
      fetch(smem_.vo_held, held, smem_.held_vo, maps_.d_out, tile.head, query, tile.batch);
    } else {
      fetch(smem_.qk_held, held, smem_.held_qk, maps_.key, tile.head, key, tile.batch);
      load_qk(tile, step);
      if constexpr (Pass::kDifferentiates) {
        fetch(smem_.vo_held, held, smem_.held_vo, maps_.value, tile.head, key, tile.batch);
      }
    }
    load_vo(tile, step);
    for (++steps_; step.advance(params_, tile); ++steps_) {
      load_qk(tile, step);
      load_vo(tile, step);
    }
  }
  __device__ __forceinline__ void load_qk(const Tile& tile, const Steps& step) {
    const Place<Pass::kQkStages> at = {steps_};
    if constexpr (Pass::kListed) {
      ptx::mbarrier_wait(&smem_.qk_met.empty[at.stage()][0], at.empty());
      smem_.seen[at.stage()] = step.seen;
    }
    load_met(smem_.qk_met, at, smem_.met_qk[at.stage()], Pass::kHoldsQueries ? maps_.key : maps_.query, tile,
             step);
  }
  __device__ __forceinline__ void load_vo(const Tile& tile, const Steps& step) {
    const Place<Pass::kVoStages> at = {steps_};
    load_met(smem_.vo_met, at, smem_.met_vo[at.stage()], Pass::kHoldsQueries ? maps_.value : maps_.d_out,
             tile, step);
  }
  template <typename Buffers, typename At, typename Pieces>
  __device__ __forceinline__ void load_met(Buffers& ring, const At& at, Pieces& pieces,
                                           const CUtensorMap& map, const Tile& tile, const Steps& step) {
    const int head = Pass::kHoldsQueries ? tile.head / params_.group : tile.head * params_.group + step.head;
    const int sequence = Pass::kHoldsQueries ? tile.key : tile.query;
    fetch(ring, at, pieces, map, head, sequence + step.first(tile, kMet), tile.batch);
  }

  // Boxes are 64 rows.
  template <typename Buffers, typename At, int kPieces, int kRows>
  __device__ __forceinline__ void fetch(Buffers& ring, const At& at, SwizzledPiece<kRows> (&pieces)[kPieces],
                                        const CUtensorMap& map, int head, int token, int batch) {
    ptx::mbarrier_wait(&ring.empty[at.stage()][0], at.empty());
    uint64_t* full = &ring.full[at.stage()][0];
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(pieces));
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      for (int row = 0; row < kRows; row += kMet) {
        ptx::tma_load_4d(pieces[piece][row], &map, full, piece * kPieceDims, head, token + row, batch);
      }
    }
  }

  // Of keys that no query sees, or of queries that see none.
  __device__ void answer_unseen(const Tile& tile) const {
    if constexpr (Pass::kOf == Gradient::kKeys) {
      answer(tile, params_.d_key, params_.key_strides, params_.head_dim);
    } else if constexpr (Pass::kOf == Gradient::kValues) {
      answer(tile, params_.d_value, params_.value_strides, params_.value_dim);
    } else {
      answer(tile, params_.d_query, params_.query_strides, params_.head_dim);
    }
  }
  __device__ void answer(const Tile& tile, void* array, const Strides& strides, int dim) const {
    if constexpr (Pass::kOfLayout) {
      store_words<Pass::kSide>(params_, tile, array, strides, dim, lane_,
                               [&](int token) { return Steps::is_nan(params_, tile, token) ? kNan : 0u; });
    } else {
      store_zeros<Pass::kSide>(params_, tile, array, strides, dim, lane_);
    }
  }

  const BackwardParams& params_;
  const Maps& maps_;
  Plan& smem_;
  const int lane_;
  int steps_ = 0;
};

}  // namespace pallas_attn::attention::sm90::backward::wide
