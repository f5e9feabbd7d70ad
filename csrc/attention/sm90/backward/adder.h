// Two warps that add gradients of queries to what is in memory, from shared memory by the copy engine, a part
// of a step each by turns. In order: what other key tiles have added is counted, and a part waits for the
// tiles before its own. While one waits until its sums have landed and tells the tile behind, the other has
// the next part.
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
    int parts = 0;
    each_tile(smem_, lane_, [&](const Tile& tile) {
      Step step(tile.met);
      do {
#pragma unroll 1
        for (int part = 0; part < Shape::kParts; ++part) {
          if (parts % kAdders == number_) add(tile, step, part, parts);
          ++parts;
        }
      } while (step.advance(tile.met, params_.group));
    });
    ptx::wait_until_stores_are_done();
  }

 private:
  static constexpr int kQueries = Shape::kQueries;
  static constexpr uint32_t kRowBytes = Shape::kSumColumns * sizeof(float);

  __device__ __forceinline__ void add(const Tile& tile, const Step& step, int part, int parts) {
    const Place<Shape::kSumStages> at = {parts};
    // Behind which key tile this one adds: what of its sequence some query of the step sees, if anything.
    const int of_step = step.met * kQueries, behind = min(of_step + kQueries, tile.band.q_len);
    const bool first = tile.before < tile.band.keys_of(of_step, behind - 1).begin / Shape::kKeys;
    const int query = of_step + part * kFragmentRows, end = min(query + kFragmentRows, behind);
    const int head = tile.head * params_.group + step.head;
    const int own = query + first_own(tile, query);
    int* const turn =
        params_.turns + (int64_t{tile.batch} * params_.q_len + tile.query + own) * params_.num_heads + head;
    const int64_t row = (int64_t{tile.batch} * params_.num_heads + head) * params_.q_len + tile.query + query;
    float* const sums = params_.sums + row * Shape::kSumColumns;
    const auto* const from = smem_.sums[Place<Shape::kSums>{parts}.stage()];
    const bool in_order = params_.ordered && own < end;
    if (in_order && !first) {
      if (lane_ == 0) {
        while (ptx::load_acquire(turn) != tile.before + 1) {
        }
      }
      __syncwarp();
      ptx::fence_async_global();
    }
    // After the turn, which mostly comes before the sums: the answer to who asks for it takes a while.
    ptx::mbarrier_wait(&smem_.added.full[at.stage()][0], at.full());
    const bool stores = params_.ordered && first;
    if (tile.q_rank < 0) {
      if (lane_ == 0 && query < end) put(sums, from[0], (end - query) * kRowBytes, stores);
    } else {
      // Rows lie apart.
#pragma unroll 1
      for (int i = lane_; i < end - query; i += 32) {
        if (tile.has<Side::kQueries>(params_, query + i)) {
          put(sums + i * Shape::kSumColumns, from[i], kRowBytes, stores);
        }
      }
    }
    ptx::close_stores();
    ptx::wait_until_stores_have_read();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(&smem_.added.empty[at.stage()][0]);
    if (!in_order) return;
    ptx::wait_until_stores_are_done();
    ptx::fence_async_global();
    __syncwarp();
    if (lane_ == 0) ptx::store_release(turn, tile.number + 1);
  }

  // Of a part's queries, the first one that is the document's; as many as there are if none is.
  __device__ __forceinline__ int first_own(const Tile& tile, int query) const {
    if (tile.q_rank < 0) return 0;
    for (int from = 0; from < kFragmentRows; from += 32) {
      const uint32_t own = __ballot_sync(0xffffffff, tile.has<Side::kQueries>(params_, query + from + lane_));
      if (own != 0) return from + __ffs(own) - 1;
    }
    return kFragmentRows;
  }

  // The first one is stored, which saves zeroing.
  __device__ __forceinline__ static void put(float* to, const float* from, uint32_t bytes, bool stores) {
    if (stores) {
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
