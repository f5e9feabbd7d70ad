// Two warps that add gradients of queries to what is in memory, from shared memory by the copy engine, a step
// each by turns. In order: what other key tiles have added is counted, and a step waits for the tiles before
// its own. While one waits until its sums have landed and tells the tile behind, the other has the next step.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/ordered.h"
#include "ptx/shared.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
class Adder {
 public:
  __device__ Adder(const BackwardParams& params, SmemPlan<Shape>& smem, int number, int lane)
      : params_(params), smem_(smem), number_(number), lane_(lane) {}

  __device__ void work() {
    ptx::wait_for_previous_kernel();
    int steps = 0;
    each_tile(smem_, lane_, [&](const Tile& tile) {
      Step step(tile.queries);
      do {
        if (steps % kAdders == number_) add(tile, step, steps);
        ++steps;
      } while (step.advance(tile.queries, params_.group));
    });
    ptx::wait_until_stores_are_done();
  }

 private:
  static constexpr int kQueries = Shape::kQueries;
  static constexpr uint32_t kRowBytes = Shape::kSumColumns * sizeof(float);

  __device__ __forceinline__ void add(const Tile& tile, const Step& step, int steps) {
    const Place<kAdders> at = {steps};
    const int query = step.query * kQueries, end = min(query + kQueries, tile.band.q_len);
    const int head = tile.kv_head * params_.group + step.head;
    const int before = tile.number - tile.band.keys_of(query, end - 1).begin / Shape::kKeys;
    int* const turn = params_.turns + int64_t{tile.first_turn + step.query} * params_.num_heads + head;
    const int64_t row = (int64_t{tile.batch} * params_.num_heads + head) * params_.q_len + tile.query + query;
    float* const sums = params_.sums + row * Shape::kSumColumns;
    ptx::mbarrier_wait(&smem_.added.full[at.stage()][0], at.full());
    if (params_.ordered && before > 0) {
      if (lane_ == 0) {
        while (ptx::load_acquire(turn) != before) {
        }
      }
      __syncwarp();
      ptx::fence_async_global();
    }
    const bool first = params_.ordered && before == 0;
    if (tile.q_rank < 0) {
      if (lane_ == 0) put(sums, smem_.sums[0], (end - query) * kRowBytes, first);
    } else {
      // Rows lie apart.
#pragma unroll 1
      for (int i = lane_; i < end - query; i += 32) {
        if (tile.has_query(params_, query + i)) {
          put(sums + i * Shape::kSumColumns, smem_.sums[i], kRowBytes, first);
        }
      }
    }
    ptx::close_stores();
    ptx::wait_until_stores_have_read();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(&smem_.added.empty[at.stage()][0]);
    if (!params_.ordered) return;
    ptx::wait_until_stores_are_done();
    ptx::fence_async_global();
    __syncwarp();
    if (lane_ == 0) ptx::store_release(turn, before + 1);
  }

  // The first one is stored, which saves zeroing.
  __device__ __forceinline__ static void put(float* to, const float* from, uint32_t bytes, bool first) {
    if (first) {
      ptx::bulk_store(to, from, bytes);
    } else {
      ptx::bulk_add(to, from, bytes);
    }
  }

  const BackwardParams& params_;
  SmemPlan<Shape>& smem_;
  const int number_, lane_;
};

}  // namespace pallas_attn::attention::sm90::backward
