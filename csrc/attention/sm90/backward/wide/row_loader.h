// The warp that has numbers of queries copied: each step's where keys are held, else those of a held tile,
// and the mean of some keys, by which `store` takes back what rounding made of a query's sum of gradients of
// scores.
#pragma once

#include "attention/sm90/backward/mean.h"
#include "attention/sm90/backward/row_loader.h"
#include "attention/sm90/backward/wide/smem_plan.h"
#include "attention/sm90/backward/wide/steps.h"

namespace pallas_attn::attention::sm90::backward::wide {

template <typename Element, typename Pass>
__device__ __forceinline__ void load_numbers(const BackwardParams& params, SmemPlan<Pass>& smem, int lane) {
  if constexpr (!Pass::kHoldsQueries) {
    load_rows<kMet, StepsOf<Pass>>(params, smem, smem.numbers, lane);
  } else {
    ptx::wait_for_previous_kernel();
    int count = 0;
    each_tile(smem, lane, [&](const Tile& tile) {
      const Place<1> place = {count++};
      ptx::mbarrier_wait(&smem.numbers.empty[0][0], place.empty());
      auto& rows = smem.rows[0];
      const int64_t first =
          (int64_t{tile.batch} * params.num_heads + tile.head) * params.q_len + tile.query + tile.first;
      for (int i = lane; i < kHeld; i += 32) {
        // Behind the last one it is the last again: nobody asks what comes of it. In front of the first
        // likewise.
        const int64_t at = first + max(min(i, tile.count - 1), -tile.first);
        rows.maximum[i] = __ldg(params.maximum + at);
        rows.rest[i] = __ldg(params.rest + at);
        rows.delta[i] = __ldg(params.delta + at);
      }
      Span keys = tile.band.keys_of(tile.first, tile.first + tile.count - 1);
      if constexpr (Pass::kListed) keys.begin = StepsOf<Pass>(params, tile).first(tile, kMet);
      for (int column = lane * kMeanColumns; column < Pass::Dims::kDim; column += 32 * kMeanColumns) {
        *reinterpret_cast<float4*>(rows.mean + column) = mean_of_keys<Element>(
            params, tile.batch, tile.head / params.group, keys, column,
            [&](int i) { return tile.has<Side::kKeys>(params, i); }, tile.key);
      }
      ptx::mbarrier_arrive(&smem.numbers.full[0][0]);
    });
  }
}

}  // namespace pallas_attn::attention::sm90::backward::wide
