// A math warpgroup: its 64 keys of every key tile against the queries that see them. Scores are [keys,
// queries], so that weights and their gradients meet queries from registers; for the gradient of queries both
// math warpgroups put theirs into shared memory, and each works out one half of it (d_queries.h).
//
// Products are issued in an order that leaves the tensor cores some at most times, and none where the loop
// turns:
//
//   issued                          beside them
//   dV, dK                          gradients of scores to shared memory, those of the other one awaited
//   dQ, S of the next step          dQ to shared memory
//   dP of the next step             weights; then their gradients, once dP is there
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/d_queries.h"
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
        weighing_(params),
        d_queries_(smem, warpgroup, thread) {}

  __device__ __forceinline__ void work() {
    const bool plain = !weighing_.capped() && !weighing_.tilted();
    for (; open(); ++tiles_) {
      float rdK[kKeyGradient] = {}, rdV[kValueGradient] = {};
      uint32_t rP[kQuerySteps][4], rdS[kQuerySteps][4];
      wait_until_full(smem_.keys, tiles_);
      clear_others_keys();
      {
        float rS[kPairs], rdP[kPairs];
        issue_scores<false>(rS);
        wait_until_full(smem_.values, tiles_);
        issue_d_weights<false>(rdP);
        weigh<false>(rS, rdP, rP, rdS);
      }
      while (left_ > 1) {
        // What most steps do not need is kept out of their way: it is three times as much code.
        if (plain && is_open(next_query())) {
          run<false, true>(rdK, rdV, rP, rdS);
        } else {
          run<false, false>(rdK, rdV, rP, rdS);
        }
      }
      run<true, true>(rdK, rdV, rP, rdS);
      store(rdK, rdV);
      release(&smem_.told.empty[told().stage()][0], thread_);
    }
  }

 private:
  static constexpr int kQueries = Shape::kQueries;
  static constexpr int kPairs = accumulators(kQueries);  // of a step's scores
  static constexpr int kQuerySteps = kQueries / kStepDims;
  static constexpr int kKeyGradient = accumulators(Shape::kDim),
                       kValueGradient = accumulators(Shape::kValueDim);
  static constexpr uint32_t kKeyPieceBytes = Shape::kKeys * kRowBytes;
  static constexpr uint32_t kQueryPieceBytes = kQueries * kRowBytes;

  __device__ __forceinline__ Place<kToldTiles> told() const { return {tiles_}; }
  __device__ __forceinline__ int keys_stage() const { return Place<Shape::kKeyStages>{tiles_}.stage(); }

  // A step, whose weights and gradients of scores are there, up to the next one's, of which all pairs count
  // if it is plain.
  template <bool kLast, bool kPlain>
  __device__ __forceinline__ void run(float (&rdK)[kKeyGradient], float (&rdV)[kValueGradient],
                                      uint32_t (&rP)[kQuerySteps][4], uint32_t (&rdS)[kQuerySteps][4]) {
    const int step = steps_;
    float rS[kPairs], rdP[kPairs];
    d_queries_.write_d_scores(rdS);
    add_product<Element, kQueryPieceBytes>(rdV, rP, outs(step), false);
    d_queries_.tell_d_scores();
    add_product<Element, kQueryPieceBytes>(rdK, rdS, queries(step), false);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdV);
    ptx::wgmma_touch(rP);
    release(&smem_.outs.empty[Place<Shape::kOutStages>{step}.stage()][0], thread_);
    typename QueryGradient<Element, Shape>::Own rdQ;
    d_queries_.issue(rdQ, step, keys_stage());
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdK);
    ptx::wgmma_touch(rdS);
    release(&smem_.queries.empty[Place<Shape::kQueryStages>{step}.stage()][0], thread_);
    advance();
    if constexpr (!kLast) issue_scores<kPlain>(rS);
    ptx::wgmma_wait<kLast ? 0 : 1>();
    if constexpr (kLast) release(&smem_.keys.empty[keys_stage()][0], thread_);
    d_queries_.put(rdQ, step);
    // Takes the registers of what has been put, but need not wait until that has landed.
    if constexpr (!kLast) issue_d_weights<kPlain>(rdP);
    d_queries_.tell(step);
    if constexpr (!kLast) weigh<kPlain>(rS, rdP, rP, rdS);
  }

  template <bool kPlain>
  __device__ __forceinline__ void issue_scores(float (&rS)[kPairs]) {
    wait_until_full(smem_.queries, steps_);
    if constexpr (!kPlain) clear_others(smem_.sQ[Place<Shape::kQueryStages>{steps_}.stage()]);
    ptx::wgmma_claim(rS);
    multiply_rows<Element, Shape::kDim, kKeyPieceBytes, kQueryPieceBytes>(
        rS, smem_.sK[keys_stage()][0][warpgroup_ * kFragmentRows], queries(steps_));
  }
  // Rows' numbers come with gradients of out.
  template <bool kPlain>
  __device__ __forceinline__ void issue_d_weights(float (&rdP)[kPairs]) {
    wait_until_full(smem_.outs, steps_);
    if constexpr (!kPlain) clear_others(smem_.sdO[Place<Shape::kOutStages>{steps_}.stage()]);
    ptx::wgmma_claim(rdP);
    multiply_rows<Element, Shape::kValueDim, kKeyPieceBytes, kQueryPieceBytes>(
        rdP, smem_.sV[0][warpgroup_ * kFragmentRows], outs(steps_));
  }
  // Scores become weights, and gradients of weights those of scores. Both are under way.
  template <bool kPlain>
  __device__ __forceinline__ void weigh(float (&rS)[kPairs], float (&rdP)[kPairs],
                                        uint32_t (&rP)[kQuerySteps][4], uint32_t (&rdS)[kQuerySteps][4]) {
    const OfColumns<kQueries> numbers(smem_.rows[Place<Shape::kOutStages>{steps_}.stage()], thread_,
                                      weighing_.factor());
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rS);
    if constexpr (!kPlain) tilt(rS);
    if constexpr (!kPlain) weighing_.cap(rS);
    weighing_.weigh(rS, numbers);
    ptx::wgmma_touch(rS);
    const Handed<kQueries> deltas(numbers);
    // Not later: without a branch here the compiler would have weights wait for what comes next.
    d_queries_.wait_for_room(steps_);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rdP);
    if (left_ == 1) release(&smem_.values.empty[0][0], thread_);
    weighing_.differentiate(rS, rdP, deltas);
    if constexpr (!kPlain) weighing_.bend(rS, rdP, numbers);
    if constexpr (!kPlain) mask(rS, rdP);
    pack<Element>(rS, rP);
    pack<Element>(rdP, rdS);
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
    query_ = next_query();
  }
  __device__ __forceinline__ int next_query() const {
    return query_ == queries_.begin ? queries_.end - 1 : query_ - 1;
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

  __device__ __forceinline__ auto& queries(int step) {
    return smem_.sQ[Place<Shape::kQueryStages>{step}.stage()][0];
  }
  __device__ __forceinline__ auto& outs(int step) {
    return smem_.sdO[Place<Shape::kOutStages>{step}.stage()][0];
  }

  __device__ __forceinline__ bool is_open(int query) const {
    return __builtin_expect(query >= open_.begin && query < open_.end, true);
  }
  // Where not all pairs of the step at hand count: weights and gradients of scores of those that do not
  // become zero, whatever they are.
  __device__ __forceinline__ void mask(float (&rS)[kPairs], float (&rdP)[kPairs]) const {
    if (is_open(query_)) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = query_ * kQueries;
    Seen<Side::kKeys>(params_, tile, first, warpgroup_ * kFragmentRows, at_).mask(rS);
    if (tile.q_rank >= 0) mask_others<Side::kQueries>(rS, params_, tile, first, thread_ % 32, at_.in_quad);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) rdP[r] = rS[r] == 0.0f ? 0.0f : rdP[r];
  }

  __device__ __forceinline__ void tilt(float (&rS)[kPairs]) const {
    if (!weighing_.tilted()) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int key = tile.first + warpgroup_ * kFragmentRows + at_.row(0);
    const int place = query_ * kQueries + at_.column(0) + tile.band.offset;
    weighing_.tilt(rS, smem_.rows[Place<Shape::kOutStages>{steps_}.stage()].slope, key - place);
  }

  __device__ __forceinline__ void store(const float (&rdK)[kKeyGradient],
                                        const float (&rdV)[kValueGradient]) const {
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
  QueryGradient<Element, Shape> d_queries_;

  int tiles_ = 0, steps_ = 0;  // opened before this one; of all tiles, before the one whose weights come next
  // The tile's query tiles, those in which all pairs count, and the step's; steps that are left with it.
  Span queries_, open_;
  int query_, left_;
};

}  // namespace pallas_attn::attention::sm90::backward
