// What a math warpgroup has to do with a step's gradient of queries: it puts its gradients of scores into
// shared memory, transposed to [queries, keys], multiplies those of both with keys, of its own part of the
// step or for its own columns, and puts what comes of it where adder.h finds it.
#pragma once

#include <cstdint>

#include "attention/sm90/backward/products.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/shared.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Element, typename Shape>
class QueryGradient {
 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kPartSteps = kFragmentRows / kStepDims, kQuerySteps = kParts * kPartSteps;
  static constexpr int kCounts = accumulators(kCountColumns);
  static constexpr int kOwn = accumulators(Shape::kOwnDims);

  // What is the warpgroup's of a step, and counts where they are a product of their own.
  struct Own {
    float d[kOwn + (Shape::kOnesBeside ? kCounts : 0)], counts[kCounts];
  };

  __device__ QueryGradient(SmemPlan<Shape>& smem, int warpgroup, int thread)
      : smem_(smem),
        warpgroup_(warpgroup),
        thread_(thread),
        own_part_(Shape::kOwnPart ? warpgroup : 0),
        own_column_(Shape::kOwnPart ? 0 : warpgroup * Shape::kOwnDims),
        at_(thread) {}

  // Before a step's are written: both have multiplied those of the step before.
  __device__ __forceinline__ void wait_for_room(int step) { wait_until_empty(smem_.scores, step); }

  // Lane l addresses what becomes row l % 8 of matrix l / 8; matrices 0 and 1 are the first eight queries of
  // a step of 16 by the warp's keys, 2 and 3 the others.
  __device__ __forceinline__ void write_d_scores(const uint32_t (&rdS)[kQuerySteps][4]) {
    const int lane = thread_ % 32, row = lane % 8 + lane / 16 * 8;
    const int chunk = at_.warp * 2 + lane / 8 % 2;
    const uint32_t to = ptx::shared_address(smem_.sdS[0][warpgroup_][row]) + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) {
      const uint32_t of_part = i / kPartSteps * Shape::kMath * kPieceBytes;
      ptx::store_matrix_x4_transposed(to + of_part + i % kPartSteps * kStepDims * kRowBytes, rdS[i]);
    }
  }
  __device__ __forceinline__ void tell_d_scores() {
    ptx::fence_async_shared();
    release(&smem_.scores.full[0][0], thread_);
  }

  // The product with keys, and sums of what is multiplied with them.
  __device__ __forceinline__ void issue(Own& own, int of_step, int keys_stage) {
    wait_until_full(smem_.scores, of_step);
    const uint64_t left = descriptor(smem_.sdS[own_part_][0], 0);
    const auto& keys = smem_.sK[keys_stage][own_column_ / kPieceDims];
    const auto beside = static_cast<uint32_t>(reinterpret_cast<const char*>(&smem_.ones) -
                                              reinterpret_cast<const char*>(&keys));
    constexpr uint32_t kKeyPieceBytes = Shape::kKeys * kRowBytes;
    const uint64_t right =
        ptx::advance_descriptor(descriptor(keys, Shape::kOnesBeside ? beside : kKeyPieceBytes),
                                own_column_ % kPieceDims * sizeof(uint16_t));
    ptx::wgmma_claim(own.d);
    if constexpr (!Shape::kOnesBeside) ptx::wgmma_claim(own.counts);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / kStepDims; ++step) {
      const uint32_t piece = step / kStepsPerPiece, within = step % kStepsPerPiece * kStepDims * 2;
      const uint64_t step_left = ptx::advance_descriptor(left, piece * kPieceBytes + within);
      // The same ones for all keys.
      const uint64_t step_right = Shape::kOnesBeside
                                      ? ptx::advance_first_piece(right, step * kStepDims * kRowBytes)
                                      : ptx::advance_descriptor(right, step * kStepDims * kRowBytes);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(own.d, step_left, step_right, step > 0);
    }
    if constexpr (!Shape::kOnesBeside) {
      const uint64_t ones = descriptor(smem_.ones, 0);
#pragma unroll
      for (int step = 0; step < kFragmentRows / kStepDims; ++step) {
        const uint64_t step_left =
            ptx::advance_descriptor(left, warpgroup_ * kPieceBytes + step * kStepDims * 2);
        ptx::wgmma_k16<Element, ptx::kKMajor>(own.counts, step_left, ones, step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // What is done goes to shared memory, once what its buffer held has been read.
  __device__ __forceinline__ void put(Own& own, int of_step) {
    ptx::wgmma_touch(own.d);
    if constexpr (!Shape::kOnesBeside) ptx::wgmma_touch(own.counts);
    const int part = own_part(of_step);
    release(&smem_.scores.empty[0][0], thread_);
    if (part >= Shape::kSums) {
      const Place<Shape::kSumStages> before = {part - Shape::kSums};
      ptx::mbarrier_wait(&smem_.added.empty[before.stage()][0], before.full());
    }
    auto& sums = smem_.sums[Place<Shape::kSums>{part}.stage()];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      float* const row = sums[at_.row(i)] + at_.in_quad * 2;
      const auto store = [&](int column, const float* d) {
        *reinterpret_cast<float2*>(row + column) = make_float2(d[0], d[1]);
      };
#pragma unroll
      for (int group = 0; group < kOwn / 4; ++group) {
        if (own_column_ + group * 8 < Shape::kDim) {
          store(own_column_ + group * 8, own.d + group * 4 + i * 2);
        }
      }
      if constexpr (Shape::kOnesBeside) {
        if (Shape::kOwnPart || warpgroup_ == 0) store(Shape::kDim, own.d + kOwn + i * 2);
      } else if (at_.in_quad * 2 < kCountColumns / Shape::kMath) {
        store(Shape::kDim + warpgroup_ * (kCountColumns / Shape::kMath), own.counts + i * 2);
      }
    }
  }
  __device__ __forceinline__ void tell(int of_step) {
    ptx::fence_async_shared();
    release(&smem_.added.full[Place<Shape::kSumStages>{own_part(of_step)}.stage()][0], thread_);
  }

 private:
  static constexpr uint32_t kPieceBytes = kFragmentRows * kRowBytes;

  // As counted over all steps, the part of which the warpgroup works out the gradient, or columns of it.
  __device__ __forceinline__ int own_part(int step) const { return step * kParts + own_part_; }

  SmemPlan<Shape>& smem_;
  const int warpgroup_, thread_;
  const int own_part_, own_column_;
  const FragmentPosition at_;
};

}  // namespace pallas_attn::attention::sm90::backward
