// Two warps that keep the order in which key tiles add to a query tile's gradient. One waits for the one
// before and tells the math warpgroups; once they have added theirs, the other tells the one behind.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/ordered.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Element, typename Shape>
class Order {
 public:
  using Plan = SmemPlan<Shape>;

  __device__ Order(const BackwardParams& params, Plan& smem, int lane)
      : params_(params), smem_(smem), lane_(lane) {}

  __device__ void work() {
    ptx::wait_for_previous_kernel();
    each_tile(smem_, lane_, [&](const Tile& tile, int count) {
      const Place<kKeyStages> keys = {count};
      ptx::mbarrier_wait(&smem_.keys.full[keys.stage()][0], keys.full());
      take_mean(tile, keys.stage());
      __syncwarp();
      if (lane_ == 0)
        each_turn(tile, [&](const Turn& turn, int before, int* place) { wait(turn, before, place); });
    });
  }
  __device__ void release() {
    each_tile(smem_, lane_, [&](const Tile& tile, int) {
      if (lane_ == 0)
        each_turn(tile, [&](const Turn& turn, int before, int* place) { pass(turn, before, place); });
    });
  }

 private:
  // Of the first keys that are held.
  __device__ void take_mean(const Tile& tile, int stage) const {
    const int first = max(tile.held_keys.begin - tile.first, 0);
    const int end = min(min(first + kSample, tile.keys), tile.held_keys.end - tile.first);
#pragma unroll 1
    for (int column = lane_ * 2; column < Shape::kPieces * kPieceDims; column += 64) {
      const int chunk = column % kPieceDims / 8;
      float left = 0.0f, right = 0.0f, some = 0.0f;
#pragma unroll 1
      for (int row = first; row < end; ++row) {
        if (!tile.holds_key(params_, tile.first + row)) continue;
        const uint16_t* at = smem_.sK[stage][column / kPieceDims][row] + ((chunk ^ row % 8) * 8);
        const float2 pair =
            ElementTraits<Element>::unpack(*reinterpret_cast<const uint32_t*>(at + column % 8));
        left += pair.x, right += pair.y, some += 1.0f;
      }
      float* const mean = smem_.mean[stage] + column;
      const float share = some > 0.0f ? 1.0f / some : 0.0f;
      mean[0] = left * share, mean[1] = right * share;
    }
  }

  // visit(turn, how many key tiles come before, where their number is) for each step of a tile.
  template <typename Visit>
  __device__ __forceinline__ void each_turn(const Tile& tile, Visit visit) {
    Step step(tile);
    do {
      const int first_query = step.query * Shape::kQueries;
      const int last_query = min(first_query + Shape::kQueries, tile.band.q_len) - 1;
      const Span keys = tile.band.keys_of(first_query, last_query);
      const int before = tile.number - keys.begin / Shape::kKeys;
      const bool last = (keys.end - 1) / Shape::kKeys == tile.number;
      const int head = tile.kv_head * params_.group + step.head;
      int* const place = params_.turns + int64_t{tile.first_turn + step.query} * params_.num_heads + head;
      visit(Turn{head, step.query, before == 0, last}, before, place);
      ++steps_;
    } while (step.advance(tile, params_.group));
  }

  __device__ __forceinline__ void wait(const Turn& turn, int before, int* place) {
    const Place<kTurnStages> at = {steps_};
    ptx::mbarrier_wait(&smem_.added.full[at.stage()][0], at.empty());
    while (before > 0 && ptx::load_acquire(place) != before) {
    }
    smem_.turn[at.stage()] = turn;
    ptx::mbarrier_arrive(&smem_.turns.full[at.stage()][0]);
  }
  __device__ __forceinline__ void pass(const Turn& turn, int before, int* place) {
    const Place<kTurnStages> at = {steps_};
    ptx::mbarrier_wait(&smem_.turns.empty[at.stage()][0], at.full());
    ptx::mbarrier_arrive(&smem_.added.full[at.stage()][0]);
    if (!turn.last) ptx::store_release(place, before + 1);
  }

  const BackwardParams& params_;
  Plan& smem_;
  const int lane_;
  int steps_ = 0;
};

}  // namespace pallas_attn::attention::sm90::backward
