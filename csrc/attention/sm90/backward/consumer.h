// A math warpgroup: its 64 keys of every key tile against the queries that see them. Scores are [keys,
// queries], so that weights and their gradients meet queries from registers; for the gradient of queries both
// math warpgroups put theirs into shared memory, and each works out one half of it.
//
// Products are issued before those in front of them are done, so that the tensor cores have some at all
// times:
//
//   issued                                    beside them
//   dP, dV                                    gradients of scores, once dP is there
//   S of the next step                        gradients of scores to shared memory, once dV is there
//   dQ, dK                                    weights of the next step; dQ to shared memory
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/products.h"
#include "attention/sm90/backward/seen.h"
#include "attention/sm90/backward/smem_plan.h"
#include "attention/sm90/backward/store.h"
#include "attention/sm90/backward/weights.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "sm90/ring.h"

namespace pallas_attn::attention::sm90::backward {

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  kCleared = 1,  // what nobody may see, by both math warpgroups
};

template <typename Element, typename Shape>
class Consumer {
 public:
  using Plan = SmemPlan<Shape>;

  __device__ Consumer(const BackwardParams& params, Plan& smem, int warpgroup, int thread)
      : params_(params),
        smem_(smem),
        warpgroup_(warpgroup),
        thread_(thread),
        at_(thread),
        weighing_(params) {}

  __device__ __forceinline__ void work() {
    for (; open(); ++tiles_) {
      float rdK[accumulators(Shape::kDim)], rdV[accumulators(Shape::kValueDim)];
      float rS[kPairs];
      wait_until_full(smem_.keys, tiles_);
      clear_others_keys();
      wait_for_queries();
      issue_scores(rS);
      wait_until_full(smem_.values, tiles_);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rS);
      weigh(rS);
      mask(rS, query_);
      if (left_ > 1) {
        run<true, false>(rdK, rdV, rS);
        while (left_ > 1) run<false, false>(rdK, rdV, rS);
        run<false, true>(rdK, rdV, rS);
      } else {
        run<true, true>(rdK, rdV, rS);
      }
      store(rdK, rdV);
      release(&smem_.told.empty[told().stage()][0], thread_);
    }
  }

 private:
  static constexpr int kQueries = Shape::kQueries;
  static constexpr int kPairs = accumulators(kQueries);  // of scores
  static constexpr int kQuerySteps = kQueries / kStepDims;
  static constexpr int kCounts = accumulators(kCountColumns);
  static constexpr int kOwn = accumulators(Shape::kOwnDims);  // of a query tile's gradient
  static constexpr int kOwnProduct = kOwn + (Shape::kOnesBeside ? kCounts : 0);
  static constexpr uint32_t kKeyPieceBytes = Shape::kKeys * kRowBytes;
  static constexpr uint32_t kQueryPieceBytes = kQueries * kRowBytes;
  static constexpr uint32_t kStepRowBytes = kStepDims * kRowBytes;

  // The warpgroup's columns of a query tile's gradient, and counts where they are a product of their own.
  struct Half {
    float d[kOwnProduct], counts[kCounts];
  };

  __device__ __forceinline__ Place<kToldTiles> told() const { return {tiles_}; }
  __device__ __forceinline__ int keys_stage() const { return Place<Shape::kKeyStages>{tiles_}.stage(); }

  // A step, whose weights are there, up to the next one's.
  template <bool kFirst, bool kLast>
  __device__ __forceinline__ void run(float (&rdK)[accumulators(Shape::kDim)],
                                      float (&rdV)[accumulators(Shape::kValueDim)], float (&rS)[kPairs]) {
    const int step = steps_, query = query_;
    float rdP[kPairs];
    uint32_t rA[kQuerySteps][4];  // weights, then gradients of scores: what meets queries
    wait_for_outs();
    ptx::wgmma_claim(rdP);
    issue_d_weights(rdP);
    pack<Element>(rS, rA);
    issue_d_values(rdV, rA, kFirst);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdP);
    if constexpr (kLast) release(&smem_.values.empty[keys_stage()][0], thread_);
    weighing_.differentiate(rS, rdP, numbers());
    release(&smem_.numbers.empty[Place<kRowStages>{step}.stage()][0], thread_);
    advance();
    if constexpr (!kLast) {
      wait_for_queries();
      issue_scores(rS);
    }
    ptx::wgmma_wait<kLast ? 0 : 1>();
    ptx::wgmma_touch(rdV);
    ptx::wgmma_touch(rA);
    release(&smem_.outs.empty[Place<kOutStages>{step}.stage()][0], thread_);
    mask(rdP, query);
    pack<Element>(rdP, rA);
    write_d_scores(rA, step);
    // That of the step before: the other warpgroup's gradients of scores are there.
    Half rdQ;
    if constexpr (!kFirst) issue_d_queries(rdQ, step - 1);
    issue_d_keys(rdK, rA, step, kFirst);
    if constexpr (!kLast) {
      ptx::wgmma_wait<kFirst ? 1 : 2>();
      ptx::wgmma_touch(rS);
      weigh(rS);
    }
    if constexpr (!kFirst) {
      ptx::wgmma_wait<1>();
      put(rdQ, step - 1);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rdK);
    ptx::wgmma_touch(rA);
    release(&smem_.queries.empty[Place<kQueryStages>{step}.stage()][0], thread_);
    if constexpr (kLast) {
      issue_d_queries(rdQ, step);
      ptx::wgmma_wait<0>();
      release(&smem_.keys.empty[keys_stage()][0], thread_);
      put(rdQ, step);
    } else {
      mask(rS, query_);  // here registers are free
    }
  }

  // Waits for a key tile; false if there are no more.
  __device__ __forceinline__ bool open() {
    ptx::mbarrier_wait(&smem_.told.full[told().stage()][0], told().full());
    const Tile& tile = smem_.tiles[told().stage()];
    if (uniform(tile.head) < 0) return false;
    queries_ = {uniform(tile.met.begin), uniform(tile.met.end)};
    open_ = {uniform(tile.open.begin), uniform(tile.open.end)};
    left_ = (queries_.end - queries_.begin) * params_.group;
    query_ = queries_.end - 1;
    return true;
  }
  // To the next step, as Step does.
  __device__ __forceinline__ void advance() {
    --left_;
    ++steps_;
    query_ = query_ == queries_.begin ? queries_.end - 1 : query_ - 1;
  }
  __device__ __forceinline__ void wait_for_queries() {
    wait_until_full(smem_.queries, steps_);
    clear_others(smem_.sQ[Place<kQueryStages>{steps_}.stage()]);
  }
  __device__ __forceinline__ void wait_for_outs() {
    wait_until_full(smem_.outs, steps_);
    clear_others(smem_.sdO[Place<kOutStages>{steps_}.stage()]);
  }

  __device__ __forceinline__ void clear_others_keys() {
    const Tile& tile = smem_.tiles[told().stage()];
    if (__builtin_expect(tile.has_others<Side::kKeys>(params_, tile.first, Shape::kKeys), false)) {
      clear(smem_.sK[keys_stage()],
            [&](int row) { return tile.holds<Side::kKeys>(params_, tile.first + row); });
    }
  }
  // Of a step's queries, or of their gradients of out.
  template <typename Pieces>
  __device__ __forceinline__ void clear_others(Pieces& pieces) {
    if (is_open(query_)) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = query_ * kQueries;
    if (!tile.has_others<Side::kQueries>(params_, first, kQueries)) return;
    clear(pieces, [&](int row) { return tile.holds<Side::kQueries>(params_, first + row); });
  }
  // Rows that are not held: zero times NaN is NaN.
  template <typename Pieces, typename Holds>
  __device__ __forceinline__ void clear(Pieces& pieces, Holds holds) {
    constexpr int kChunks = kRowBytes / sizeof(uint4), kRows = sizeof(pieces[0]) / kRowBytes;
#pragma unroll 1
    for (int i = warpgroup_ * kWarpgroupThreads + thread_; i < kRows * kChunks;
         i += Shape::kConsumerThreads) {
      if (holds(i / kChunks)) continue;
#pragma unroll 1
      for (auto& piece : pieces) reinterpret_cast<uint4*>(piece)[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync_unaligned(kCleared, Shape::kConsumerThreads);
  }

  __device__ __forceinline__ void issue_scores(float (&rS)[kPairs]) {
    multiply_rows<Element, Shape::kDim, kKeyPieceBytes, kQueryPieceBytes>(
        rS, smem_.sK[keys_stage()][0][warpgroup_ * kFragmentRows],
        smem_.sQ[Place<kQueryStages>{steps_}.stage()][0]);
  }
  __device__ __forceinline__ void issue_d_weights(float (&rdP)[kPairs]) {
    multiply_rows<Element, Shape::kValueDim, kKeyPieceBytes, kQueryPieceBytes>(
        rdP, smem_.sV[keys_stage()][0][warpgroup_ * kFragmentRows],
        smem_.sdO[Place<kOutStages>{steps_}.stage()][0]);
  }
  __device__ __forceinline__ void issue_d_values(float (&rdV)[accumulators(Shape::kValueDim)],
                                                 uint32_t (&rP)[kQuerySteps][4], bool first) {
    add_product<Element, kQueryPieceBytes>(rdV, rP, smem_.sdO[Place<kOutStages>{steps_}.stage()][0], first);
  }
  __device__ __forceinline__ void issue_d_keys(float (&rdK)[accumulators(Shape::kDim)],
                                               uint32_t (&rdS)[kQuerySteps][4], int step, bool first) {
    add_product<Element, kQueryPieceBytes>(rdK, rdS, smem_.sQ[Place<kQueryStages>{step}.stage()][0], first);
  }

  // The warpgroup's columns of a step's gradient of queries; and sums of what is multiplied with keys.
  __device__ __forceinline__ void issue_d_queries(Half& half, int of_step) {
    wait_until_full(smem_.scores, of_step);
    const int buffer = Place<kScoreStages>{of_step}.stage();
    const uint64_t left = descriptor(smem_.sdS[buffer][0], 0);
    const auto& keys = smem_.sK[keys_stage()][warpgroup_ * Shape::kOwnDims / kPieceDims];
    const auto beside = static_cast<uint32_t>(reinterpret_cast<const char*>(&smem_.ones) -
                                              reinterpret_cast<const char*>(&keys));
    const uint64_t right =
        ptx::advance_descriptor(descriptor(keys, Shape::kOnesBeside ? beside : kKeyPieceBytes),
                                warpgroup_ * Shape::kOwnDims % kPieceDims * sizeof(uint16_t));
    ptx::wgmma_claim(half.d);
    if constexpr (!Shape::kOnesBeside) ptx::wgmma_claim(half.counts);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / kStepDims; ++step) {
      const uint32_t piece = step / kStepsPerPiece, within = step % kStepsPerPiece * kStepDims * 2;
      const uint64_t step_left = ptx::advance_descriptor(left, piece * kQueryPieceBytes + within);
      // The same ones for all keys.
      const uint64_t step_right = Shape::kOnesBeside ? ptx::advance_first_piece(right, step * kStepRowBytes)
                                                     : ptx::advance_descriptor(right, step * kStepRowBytes);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(half.d, step_left, step_right, step > 0);
    }
    if constexpr (!Shape::kOnesBeside) {
      const uint64_t ones = descriptor(smem_.ones, 0);
#pragma unroll
      for (int step = 0; step < kFragmentRows / kStepDims; ++step) {
        const uint64_t step_left =
            ptx::advance_descriptor(left, warpgroup_ * kQueryPieceBytes + step * kStepDims * 2);
        ptx::wgmma_k16<Element, ptx::kKMajor>(half.counts, step_left, ones, step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ bool is_open(int query) const {
    return __builtin_expect(query >= open_.begin && query < open_.end, true);
  }
  // Where not all pairs of a step count.
  __device__ __forceinline__ void mask(float (&d)[kPairs], int query) const {
    if (is_open(query)) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = query * kQueries;
    Seen<Side::kKeys>(params_, tile, first, warpgroup_ * kFragmentRows, at_).mask(d);
    if (tile.q_rank >= 0) mask_others<Side::kQueries>(d, params_, tile, first, thread_ % 32, at_.in_quad);
  }

  __device__ __forceinline__ OfColumns<kQueries> numbers() const {
    return {smem_.rows[Place<kRowStages>{steps_}.stage()], at_};
  }
  __device__ __forceinline__ void weigh(float (&rS)[kPairs]) {
    wait_until_full(smem_.numbers, steps_);
    weighing_.weigh(rS, numbers());
  }

  // Transposed to [queries, keys]: lane l addresses what becomes row l % 8 of matrix l / 8; matrices 0 and 1
  // are the first eight queries of a step of 16 by the warp's keys, 2 and 3 the others.
  __device__ __forceinline__ void write_d_scores(const uint32_t (&rdS)[kQuerySteps][4], int of_step) {
    wait_until_empty(smem_.scores, of_step);
    const int buffer = Place<kScoreStages>{of_step}.stage();
    const int lane = thread_ % 32, row = lane % 8 + lane / 16 * 8;
    const int chunk = at_.warp * 2 + lane / 8 % 2;
    const uint32_t to = ptx::shared_address(smem_.sdS[buffer][warpgroup_][row]) + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      ptx::store_matrix_x4_transposed(to + step * kStepRowBytes, rdS[step]);
    }
    ptx::fence_async_shared();
    release(&smem_.scores.full[buffer][0], thread_);
  }

  // A step's gradient of queries, which is done, to shared memory, once the one before has been read.
  __device__ __forceinline__ void put(Half& half, int step) {
    ptx::wgmma_touch(half.d);
    if constexpr (!Shape::kOnesBeside) ptx::wgmma_touch(half.counts);
    release(&smem_.scores.empty[Place<kScoreStages>{step}.stage()][0], thread_);
    if (step > 0) {
      const Place<kAdders> before = {step - 1};
      ptx::mbarrier_wait(&smem_.added.empty[before.stage()][0], before.full());
    }
    const int first = warpgroup_ * Shape::kOwnDims;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      float* const row = smem_.sums[at_.row(i)] + at_.in_quad * 2;
      const auto store = [&](int column, const float* d) {
        *reinterpret_cast<float2*>(row + column) = make_float2(d[0], d[1]);
      };
#pragma unroll
      for (int group = 0; group < kOwn / 4; ++group) {
        if (first + group * 8 < Shape::kDim) store(first + group * 8, half.d + group * 4 + i * 2);
      }
      if constexpr (Shape::kOnesBeside) {
        if (warpgroup_ == 0) store(Shape::kDim, half.d + kOwn + i * 2);
      } else if (at_.in_quad * 2 < kCountColumns / Shape::kMath) {
        store(Shape::kDim + warpgroup_ * (kCountColumns / Shape::kMath), half.counts + i * 2);
      }
    }
    ptx::fence_async_shared();
    release(&smem_.added.full[Place<kAdders>{step}.stage()][0], thread_);
  }

  __device__ __forceinline__ void store(const float (&rdK)[accumulators(Shape::kDim)],
                                        const float (&rdV)[accumulators(Shape::kValueDim)]) const {
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = tile.first + warpgroup_ * kFragmentRows;
    const auto has = [&](int row) { return tile.has<Side::kKeys>(params_, first + row); };
    const auto place = [&](const Strides& strides) {
      return tile.batch * strides.batch + tile.head * strides.head + (tile.key + first) * strides.token;
    };
    store_rows<Element>(params_.d_key, place(params_.key_strides), params_.key_strides.token,
                        params_.head_dim, rdK, params_.scale, at_, has);
    store_rows<Element>(params_.d_value, place(params_.value_strides), params_.value_strides.token,
                        params_.value_dim, rdV, 1.0f, at_, has);
  }

  const BackwardParams& params_;
  Plan& smem_;
  const int warpgroup_;
  const int thread_;
  const FragmentPosition at_;
  const Weighing weighing_;

  int tiles_ = 0, steps_ = 0;  // opened before this one; of all tiles, before the one whose weights come next
  // The tile's query tiles, those in which all pairs count, and the step's; steps that are left with it.
  Span queries_, open_;
  int query_, left_;
};

}  // namespace pallas_attn::attention::sm90::backward
