// The warp that goes ahead: takes the next key tile, tells the others, and has keys, values, queries and
// gradients of out fetched. What meets nothing it answers itself.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/maps.h"
#include "attention/sm90/backward/smem_plan.h"
#include "attention/sm90/backward/tile_list.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
class Loader {
 public:
  using Plan = SmemPlan<Shape>;

  __device__ Loader(const BackwardParams& params, const Maps& maps, Plan& smem, int lane)
      : params_(params), maps_(maps), smem_(smem), lane_(lane) {}

  __device__ void work() {
    ptx::wait_for_previous_kernel();
    const TileList<Side::kKeys, Shape::kKeys, Shape::kQueries> list(params_, params_.counters,
                                                                    params_.heads_together);
    take_tiles(
        list, smem_, lane_, [&](int index, Tile& tile, int) { list.find(index, tile); },
        [](const Tile& tile, int) { return tile.met.begin < tile.met.end; },
        [&](const Tile& tile) { answer_unseen(tile); },
        [&](const Tile& tile, int count) { load(tile, count); });
    ptx::allow_dependent_launch();
  }

 private:
  // Keys last where they have one buffer: the tile before needs it to its end.
  __device__ void load(const Tile& tile, int count) {
    const int token = tile.key + tile.first;
    const Place<Shape::kKeyStages> at = {count};
    Step step(tile.met);
    const auto load_keys = [&] {
      fetch(smem_.keys, at, smem_.sK[at.stage()], maps_.key, tile.head, token, tile.batch);
    };
    load_queries(tile, step);
    if (Shape::kKeyStages > 1) load_keys();
    fetch(smem_.values, Place<1>{count}, smem_.sV, maps_.value, tile.head, token, tile.batch);
    load_outs(tile, step);
    if (Shape::kKeyStages == 1) load_keys();
    ++steps_;
    while (step.advance(tile.met, params_.group)) {
      load_queries(tile, step);
      load_outs(tile, step);
      ++steps_;
    }
  }
  __device__ __forceinline__ void load_queries(const Tile& tile, const Step& step) {
    const Place<Shape::kQueryStages> at = {steps_};
    fetch(smem_.queries, at, smem_.sQ[at.stage()], maps_.query, tile.head * params_.group + step.head,
          tile.query + step.met * Shape::kQueries, tile.batch);
  }
  __device__ __forceinline__ void load_outs(const Tile& tile, const Step& step) {
    const Place<Shape::kOutStages> at = {steps_};
    fetch(smem_.outs, at, smem_.sdO[at.stage()], maps_.d_out, tile.head * params_.group + step.head,
          tile.query + step.met * Shape::kQueries, tile.batch);
  }

  template <typename Buffers, typename At, typename Pieces>
  __device__ __forceinline__ void fetch(Buffers& ring, const At& at, Pieces& pieces, const CUtensorMap& map,
                                        int head, int token, int batch) {
    ptx::mbarrier_wait(&ring.empty[at.stage()][0], at.empty());
    uint64_t* full = &ring.full[at.stage()][0];
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(pieces));
#pragma unroll 1
    for (uint32_t piece = 0; piece < sizeof(pieces) / sizeof(pieces[0]); ++piece) {
      ptx::tma_load_4d(pieces[piece], &map, full, piece * kPieceDims, head, token, batch);
    }
  }

  // Of keys that no query sees. Those of queries that see no key come from finish/.
  __device__ void answer_unseen(const Tile& tile) const {
    store_zeros<Side::kKeys>(params_, tile, params_.d_key, params_.key_strides, params_.head_dim, lane_);
    store_zeros<Side::kKeys>(params_, tile, params_.d_value, params_.value_strides, params_.value_dim, lane_);
  }

  const BackwardParams& params_;
  const Maps& maps_;
  Plan& smem_;
  const int lane_;
  int steps_ = 0;
};

}  // namespace pallas_attn::attention::sm90::backward
