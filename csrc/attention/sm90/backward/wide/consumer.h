// A math warpgroup of a pass: its 64 tokens of every held tile against those that they meet. What comes of a
// step's scores stays in registers, where it is the left operand of the product that adds to the gradient.
//
//   issued                                        beside them
//   gradient, S and dP of the next step           the next step's weights, once S is there
//
// What is left, from weights to that operand, has the other warpgroup's products beside it.
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/products.h"
#include "attention/sm90/backward/seen.h"
#include "attention/sm90/backward/store.h"
#include "attention/sm90/backward/weights.h"
#include "attention/sm90/backward/wide/smem_plan.h"
#include "attention/sm90/backward/wide/steps.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90::backward::wide {

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  kCleared = 1,  // what nobody may see, by both math warpgroups
};

template <typename Element, typename Pass>
class Consumer {
 public:
  using Plan = SmemPlan<Pass>;
  using Dims = typename Pass::Dims;

  __device__ Consumer(const BackwardParams& params, Plan& smem, int warpgroup, int thread)
      : params_(params),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(thread),
        at_(thread),
        weighing_(params) {}

  __device__ __forceinline__ void work() {
    for (; open(); ++tiles_) {
      float rD[accumulators(Pass::kOut)];
      uint32_t rA[kSteps][4];
      wait_until_full(smem_.qk_held, tiles_);
      if constexpr (Pass::kDifferentiates) wait_until_full(smem_.vo_held, tiles_);
      if constexpr (Pass::kHoldsQueries) wait_until_full(smem_.numbers, tiles_);
      excess_[0] = excess_[1] = 0.0f;
      {
        float rS[kPairs], rdP[kPairs];
        issue_step(rS, rdP);
        settle(rS, rdP, rA);
      }
      bool first = true;
      for (; left_ > 1; first = false) {
        float rS[kPairs], rdP[kPairs];
        const int step = steps_;
        issue_gradient(rD, rA, first);
        advance();
        issue_step(rS, rdP);
        ptx::wgmma_wait<Pass::kDifferentiates ? 2 : 1>();
        ptx::wgmma_touch(rD);
        ptx::wgmma_touch(rA);
        release_met(step);
        settle(rS, rdP, rA);
      }
      issue_gradient(rD, rA, first);
      release(&smem_.qk_held.empty[0][0], thread_);
      if constexpr (Pass::kDifferentiates) release(&smem_.vo_held.empty[0][0], thread_);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rD);
      release_met(steps_);
      ++steps_;
      store(rD);
      if constexpr (Pass::kHoldsQueries) release(&smem_.numbers.empty[0][0], thread_);
      release(&smem_.told.empty[told().stage()][0], thread_);
    }
  }

 private:
  static constexpr int kPairs = accumulators(kMet);
  static constexpr int kSteps = kMet / kStepDims;
  static constexpr uint32_t kHeldPieceBytes = kHeld * kRowBytes, kMetPieceBytes = kMet * kRowBytes;

  __device__ __forceinline__ Place<kToldTiles> told() const { return {tiles_}; }
  __device__ __forceinline__ const Tile& tile() const { return smem_.tiles[told().stage()]; }

  // Waits for a tile; false if there are no more.
  __device__ __forceinline__ bool open() {
    ptx::mbarrier_wait(&smem_.told.full[told().stage()][0], told().full());
    if (uniform(tile().head) < 0) return false;
    met_ = {uniform(tile().met.begin), uniform(tile().met.end)};
    open_ = {uniform(tile().open.begin), uniform(tile().open.end)};
    left_ = Pass::kListed ? uniform(smem_.steps[told().stage()])
                          : (met_.end - met_.begin) * met_heads<Pass::kSide>(params_);
    at_met_ = met_.end - 1;
    return true;
  }
  // To the next step, as Step does.
  __device__ __forceinline__ void advance() {
    --left_;
    ++steps_;
    at_met_ = at_met_ == met_.begin ? met_.end - 1 : at_met_ - 1;
  }
  // Of what the step's gradient is a product of.
  __device__ __forceinline__ void release_met(int step) {
    if constexpr (Pass::kDifferentiates) {
      release(&smem_.qk_met.empty[Place<Pass::kQkStages>{step}.stage()][0], thread_);
    } else {
      release(&smem_.vo_met.empty[Place<Pass::kVoStages>{step}.stage()][0], thread_);
    }
  }

  // The step's scores, and gradients of its weights.
  __device__ __forceinline__ void issue_step(float (&rS)[kPairs], float (&rdP)[kPairs]) {
    const int qk = Place<Pass::kQkStages>{steps_}.stage(), vo = Place<Pass::kVoStages>{steps_}.stage();
    const int row = warpgroup_ * kFragmentRows;
    wait_until_full(smem_.qk_met, steps_);
    if constexpr (Pass::kListed) seen_ = uniform(smem_.seen[qk]);
    if constexpr (Pass::kDifferentiates) clear_others(smem_.met_qk[qk]);
    ptx::wgmma_claim(rS);
    multiply_rows<Element, Dims::kDim, kHeldPieceBytes, kMetPieceBytes>(rS, smem_.held_qk[0][row],
                                                                        smem_.met_qk[qk][0]);
    if constexpr (Pass::kDifferentiates) {
      wait_until_full(smem_.vo_met, steps_);
      ptx::wgmma_claim(rdP);
      multiply_rows<Element, Dims::kValueDim, kHeldPieceBytes, kMetPieceBytes>(rdP, smem_.held_vo[0][row],
                                                                               smem_.met_vo[vo][0]);
    }
  }
  // From them to the left operand of the step's gradient.
  __device__ __forceinline__ void settle(float (&rS)[kPairs], float (&rdP)[kPairs],
                                         uint32_t (&rA)[kSteps][4]) {
    if constexpr (!Pass::kHoldsQueries) wait_until_full(smem_.numbers, steps_);
    const auto numbers = this->numbers();
    ptx::wgmma_wait<Pass::kDifferentiates ? 1 : 0>();
    ptx::wgmma_touch(rS);
    if constexpr (!Pass::kDifferentiates) {
      release(&smem_.qk_met.empty[Place<Pass::kQkStages>{steps_}.stage()][0], thread_);
    }
    weighing_.cap(rS);
    weighing_.weigh(rS, numbers);
    if constexpr (Pass::kDifferentiates) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rdP);
      release(&smem_.vo_met.empty[Place<Pass::kVoStages>{steps_}.stage()][0], thread_);
      weighing_.differentiate(rS, rdP, numbers);
      weighing_.bend(rS, rdP, numbers);
      mask(rdP);
      pack<Element>(rdP, rA);
      if constexpr (Pass::kHoldsQueries) count(rA);
    } else {
      mask(rS);
      pack<Element>(rS, rA);
    }
    if constexpr (!Pass::kHoldsQueries) {
      release(&smem_.numbers.empty[Place<Plan::kRowStages>{steps_}.stage()][0], thread_);
    }
  }
  __device__ __forceinline__ void issue_gradient(float (&rD)[accumulators(Pass::kOut)],
                                                 uint32_t (&rA)[kSteps][4], bool first) {
    if constexpr (Pass::kDifferentiates) {
      add_product<Element, kMetPieceBytes>(rD, rA, smem_.met_qk[Place<Pass::kQkStages>{steps_}.stage()][0],
                                           first);
    } else {
      const int stage = Place<Pass::kVoStages>{steps_}.stage();
      wait_until_full(smem_.vo_met, steps_);
      clear_others(smem_.met_vo[stage]);
      add_product<Element, kMetPieceBytes>(rD, rA, smem_.met_vo[stage][0], first);
    }
  }

  // Rows of a step that are not the sequence's, or count for nobody: zero times NaN is NaN. Lists have all of
  // an array's, and what lies behind its end is zero.
  template <typename Pieces>
  __device__ __forceinline__ void clear_others(Pieces& pieces) {
    if (Pass::kMeets == Meets::kListed || is_open()) return;
    constexpr Side kSide = other(Pass::kSide);
    const int first = first_met();
    if (!tile().template has_others<kSide>(params_, first, kMet)) return;
    constexpr int kChunks = kRowBytes / sizeof(uint4);
#pragma unroll 1
    for (int i = warpgroup_ * kWarpgroupThreads + thread_; i < kMet * kChunks; i += kConsumerThreads) {
      if (tile().template holds<kSide>(params_, first + i / kChunks)) continue;
#pragma unroll 1
      for (auto& piece : pieces) reinterpret_cast<uint4*>(piece)[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync_unaligned(kCleared, kConsumerThreads);
  }

  // The step's first met token among the sequence's.
  __device__ __forceinline__ int first_met() const {
    if constexpr (Pass::kOfLayout) return LayoutSteps<Pass>::first_of(tile(), seen_);
    return at_met_ * kMet;
  }
  __device__ __forceinline__ bool is_open() const {
    if constexpr (Pass::kOfLayout) return LayoutSteps<Pass>::all_count(seen_);
    if constexpr (Pass::kListed) return seen_ < 0;
    return __builtin_expect(at_met_ >= open_.begin && at_met_ < open_.end, true);
  }
  // Where not all pairs of a step count.
  __device__ __forceinline__ void mask(float (&d)[kPairs]) const {
    if (is_open()) return;
    if constexpr (Pass::kMeets == Meets::kListed)
      return mask_by_bits<Pass>(d, params_, seen_, warpgroup_, thread_, at_);
    constexpr Side kMetSide = other(Pass::kSide);
    const int first = first_met();
    Seen<Pass::kSide>(params_, tile(), first, warpgroup_ * kFragmentRows, at_).mask(d);
    if ((kMetSide == Side::kKeys ? tile().k_rank : tile().q_rank) >= 0) {
      mask_others<kMetSide>(d, params_, tile(), first, thread_ % 32, at_.in_quad);
    }
  }

  __device__ __forceinline__ auto numbers() const {
    if constexpr (Pass::kHoldsQueries) {
      return OfRows(smem_.rows[0], warpgroup_ * kFragmentRows, at_, weighing_.factor());
    } else {
      return OfColumns<kMet>(smem_.rows[Place<Plan::kRowStages>{steps_}.stage()], thread_,
                             weighing_.factor());
    }
  }

  // Sums over keys of what is multiplied with them.
  __device__ __forceinline__ void count(const uint32_t (&packed)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = ElementTraits<Element>::unpack(packed[step][j]);
        excess_[j % kRowsPerThread] += two.x + two.y;
      }
    }
  }

  __device__ __forceinline__ void store(float (&rD)[accumulators(Pass::kOut)]) {
    const int first = tile().first + warpgroup_ * kFragmentRows;
    if constexpr (Pass::kHoldsQueries) {
      take_back(rD, first);
      store_to(params_.d_query, params_.query_strides, tile().query + first, params_.head_dim, rD,
               params_.scale);
    } else if constexpr (Pass::kDifferentiates) {
      store_to(params_.d_key, params_.key_strides, tile().key + first, params_.head_dim, rD, params_.scale);
    } else {
      store_to(params_.d_value, params_.value_strides, tile().key + first, params_.value_dim, rD, 1.0f);
    }
  }
  __device__ __forceinline__ void store_to(void* array, const Strides& strides, int token, int dim,
                                           const float (&rD)[accumulators(Pass::kOut)], float factor) const {
    const int64_t place =
        tile().batch * strides.batch + tile().head * strides.head + token * int64_t{strides.token};
    const int first = tile().first + warpgroup_ * kFragmentRows;
    store_rows<Element>(array, place, strides.token, dim, rD, factor, at_,
                        [&](int row) { return tile().template has<Pass::kSide>(params_, first + row); });
  }

  // What rounding made of the sum over keys of gradients of scores, times what keys have in common
  // (pallas_attn/_tile/weights.py). Not of capped scores, whose sum is not known.
  __device__ __forceinline__ void take_back(float (&rD)[accumulators(Pass::kOut)], int first) const {
    if (weighing_.capped()) return;
    const int64_t head = (int64_t{tile().batch} * params_.num_heads + tile().head) * params_.q_len;
    float excess[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int query = first + at_.row(i);
      const Span seen = tile().band.keys_of(query, query);
      excess[i] = quad_reduce(excess_[i], [](float a, float b) { return a + b; });
      const bool some = tile().template has<Side::kQueries>(params_, query) && seen.begin < seen.end;
      excess[i] = some ? excess[i] - __ldg(params_.total + head + tile().query + query) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < accumulators(Pass::kOut); r += 2) {
      const int i = FragmentPosition::row_of(r);
      const float2 mean = *reinterpret_cast<const float2*>(smem_.rows[0].mean + at_.column(r));
      if (excess[i] == 0.0f) continue;
      rD[r] = fmaf(-excess[i], mean.x, rD[r]);
      rD[r + 1] = fmaf(-excess[i], mean.y, rD[r + 1]);
    }
  }

  const BackwardParams& params_;
  Plan& smem_;
  const int warpgroup_;
  const int thread_;
  const FragmentPosition at_;
  const Weighing weighing_;

  int tiles_ = 0, steps_ = 0;  // opened before this one; of all tiles, before the one whose scores come next
  // The held tile's met tiles, those in which all pairs count, and the step's; steps that are left with it.
  Span met_, open_;
  int at_met_, left_;
  int seen_;  // of lists: which pairs of the step count
  float excess_[kRowsPerThread];
};

}  // namespace pallas_attn::attention::sm90::backward::wide
