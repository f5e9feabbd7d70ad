// A warp that has the numbers of each step's queries copied: log-sum-exp and delta.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/rings.h"
#include "attention/sm90/backward/rows.h"
#include "ptx/async_copy.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::attention::sm90::backward {

// `Steps`: their head and place, as Step has them.
// Into a ring that is theirs, or that of what comes with them.
template <int kQueries, typename Steps, typename Plan, int kStages>
__device__ __forceinline__ void load_rows(const BackwardParams& params, Plan& smem, Ring<kStages, 1, 1>& ring,
                                          int lane) {
  using TileRows = Rows<kQueries>;
  ptx::wait_for_previous_kernel();
  int count = 0;
  each_tile(smem, lane, [&](const Tile& tile) {
    Steps steps(params, tile);
    do {
      const Place<kStages> place = {count++};
      ptx::mbarrier_wait(&ring.empty[place.stage()][0], place.empty());
      TileRows& rows = smem.rows[place.stage()];
      const int64_t head = int64_t{tile.batch} * params.num_heads + tile.head * params.group + steps.head;
      const int64_t own = head * params.q_len + tile.query;
      const int first = steps.first(tile, kQueries);
      const uint32_t lse = ptx::shared_address(rows.lse), delta = ptx::shared_address(rows.delta);
#pragma unroll 1
      for (int i = lane; i < kQueries; i += 32) {
        // Behind the last one it is the last again: nobody asks what comes of it. In front of the first
        // likewise.
        const int64_t at = own + max(min(first + i, tile.band.q_len - 1), 0);
        ptx::copy_word_async(lse + TileRows::lse_word(i) * 4, params.maximum + at);
        ptx::copy_word_async(lse + TileRows::lse_word(i) * 4 + 8, params.rest + at);
        ptx::copy_word_async(delta + i * 4, params.delta + at);
      }
      if (params.alibi != nullptr && lane == 0) {
        ptx::copy_word_async(ptx::shared_address(&rows.slope),
                             params.alibi + tile.head * params.group + steps.head);
      }
      ptx::arrive_behind_copies(&ring.full[place.stage()][0]);
    } while (steps.advance(params, tile));
  });
}

}  // namespace pallas_attn::attention::sm90::backward
