// A warp that has the numbers of each step's queries copied: log-sum-exp and delta.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/async_copy.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
__device__ __forceinline__ void load_rows(const BackwardParams& params, SmemPlan<Shape>& smem, int lane) {
  ptx::wait_for_previous_kernel();
  int count = 0;
  each_tile(smem, lane, [&](const Tile& tile, int) {
    Step step(tile);
    do {
      const Place<kQueryStages> steps = {count++};
      ptx::mbarrier_wait(&smem.queries.empty[steps.stage()][0], steps.empty());
      auto& rows = smem.rows[steps.stage()];
      const int64_t head = int64_t{tile.batch} * params.num_heads + tile.kv_head * params.group + step.head;
      const int64_t first = head * params.q_len + tile.query;
#pragma unroll 1
      for (int i = lane; i < Shape::kQueries; i += 32) {
        // Behind the last one it is the last again: nobody asks what comes of it.
        const int64_t at = first + min(step.query * Shape::kQueries + i, tile.band.q_len - 1);
        ptx::copy_word_async(ptx::shared_address(rows.maximum + i), params.maximum + at);
        ptx::copy_word_async(ptx::shared_address(rows.rest + i), params.rest + at);
        ptx::copy_word_async(ptx::shared_address(rows.delta + i), params.delta + at);
      }
      ptx::arrive_behind_copies(&smem.queries.full[steps.stage()][0]);
    } while (step.advance(tile, params.group));
  });
}

}  // namespace pallas_attn::attention::sm90::backward
