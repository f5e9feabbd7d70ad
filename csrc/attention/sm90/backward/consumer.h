// A math warpgroup: its 64 keys of every key tile against the queries that see them. Scores are [keys,
// queries], so that weights and their gradients meet queries from registers; for the gradient of queries both
// math warpgroups put theirs into shared memory, and each works out one half of it (d_queries.h).
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
  kTurn = 2,     // of the first math warpgroup to make weights; behind it the other's
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
    if (kParts == 2 && warpgroup_ == 1) ptx::named_barrier_arrive(kTurn, Shape::kConsumerThreads);
    for (; open(); ++tiles_) {
      float rdK[kKeyGradient], rdV[kValueGradient];
      float rS[kPairs];
      wait_until_full(smem_.keys, tiles_);
      clear_others_keys();
      wait_for_queries();
      issue_scores(rS);
      wait_until_full(smem_.values, tiles_);
      if constexpr (kParts == 1) {
        float rdP[kPairs];
        zero(rdK);
        zero(rdV);
        begin_d_weights(rdP);
        weigh_step(rS, rdP);
        while (left_ > 1) run<false>(rdK, rdV, rS, rdP);
        run<true>(rdK, rdV, rS, rdP);
      } else {
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(rS);
        weigh(rS);
        mask(rS, query_);
        if (left_ > 1) {
          run_halves<true, false>(rdK, rdV, rS);
          while (left_ > 1) run_halves<false, false>(rdK, rdV, rS);
          run_halves<false, true>(rdK, rdV, rS);
        } else {
          run_halves<true, true>(rdK, rdV, rS);
        }
      }
      store(rdK, rdV);
      release(&smem_.told.empty[told().stage()][0], thread_);
    }
    if (kParts == 2 && warpgroup_ == 0) ptx::named_barrier_sync(kTurn, Shape::kConsumerThreads);
  }

 private:
  static constexpr int kQueries = Shape::kQueries, kParts = Shape::kParts;
  static constexpr int kPairs = accumulators(kFragmentRows);  // of a part's scores
  static constexpr int kQuerySteps = kFragmentRows / kStepDims;
  // Of rows' numbers, loaded early in a step of one part: all deltas, and a quarter of the log-sum-exps.
  static constexpr int kDeltas = kPairs / 8, kLses = kPairs / 4;
  static constexpr int kKeyGradient = accumulators(Shape::kDim),
                       kValueGradient = accumulators(Shape::kValueDim);
  static constexpr uint32_t kKeyPieceBytes = Shape::kKeys * kRowBytes;
  static constexpr uint32_t kQueryPieceBytes = kQueries * kRowBytes;

  __device__ __forceinline__ Place<kToldTiles> told() const { return {tiles_}; }
  __device__ __forceinline__ int keys_stage() const { return Place<Shape::kKeyStages>{tiles_}.stage(); }

  // A step, whose weights and gradients of scores are there, up to the next one's. No product is under way
  // where the loop turns.
  template <bool kLast>
  __device__ __forceinline__ void run(float (&rdK)[kKeyGradient], float (&rdV)[kValueGradient],
                                      float (&rS)[kPairs], float (&rdP)[kPairs]) {
    const int step = steps_;
    uint32_t rP[kQuerySteps][4], rdS[kQuerySteps][4];
    pack<Element>(rS, rP);
    pack<Element>(rdP, rdS);
    d_queries_.write_d_scores(rdS, step);
    issue_d_values(rdV, rP, false);
    d_queries_.tell_d_scores(step);
    issue_d_keys(rdK, rdS, step, false);
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
    if constexpr (kLast) {
      ptx::wgmma_wait<0>();
      release(&smem_.keys.empty[keys_stage()][0], thread_);
      d_queries_.put(rdQ, step);
      d_queries_.tell_sums(step);
    } else {
      wait_for_queries();
      ptx::wgmma_claim(rS);
      issue_scores(rS);
      ptx::wgmma_wait<1>();
      d_queries_.put(rdQ, step);
      begin_d_weights(rdP);
      d_queries_.tell_sums(step);
      weigh_step(rS, rdP);
    }
  }

  __device__ __forceinline__ void begin_d_weights(float (&rdP)[kPairs]) {
    wait_for_outs();
    ptx::wgmma_claim(rdP);
    issue_d_weights(rdP);
  }
  // Scores become weights, and gradients of weights those of scores: both are asked for.
  __device__ __forceinline__ void weigh_step(float (&rS)[kPairs], float (&rdP)[kPairs]) {
    wait_until_full(smem_.numbers, steps_);
    const Early<kQueries, 0, kLses> lses(numbers(steps_));
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rS);
    tilt(rS);
    weighing_.weigh(rS, lses);
    ptx::wgmma_touch(rS);
    const Early<kQueries, kDeltas, 0> deltas(numbers(steps_));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rdP);
    if (left_ == 1) release(&smem_.values.empty[0][0], thread_);
    weighing_.differentiate(rS, rdP, deltas);
    release(&smem_.numbers.empty[Place<Shape::kRowStages>{steps_}.stage()][0], thread_);
    mask(rS, query_);
    clear_unweighed(rdP, rS, query_);
  }

  // The same of a step of two parts: the second one's scores are issued behind what the first one's meet, and
  // so are those of the next step behind the second one's.
  template <bool kFirst, bool kLast>
  __device__ __forceinline__ void run_halves(float (&rdK)[kKeyGradient], float (&rdV)[kValueGradient],
                                             float (&rS)[kPairs]) {
    const int step = steps_, query = query_;
    float rT[kPairs], rdP[kPairs];
    uint32_t rA[kQuerySteps][4];
    wait_for_outs();
    ptx::wgmma_claim(rdP);
    issue_d_weights(rdP);
    pack<Element>(rS, rA);
    issue_d_values(rdV, rA, kFirst);
    ptx::wgmma_claim(rT);
    issue_scores(rT, 1);
    ptx::wgmma_wait<2>();
    ptx::wgmma_touch(rdP);
    weighing_.differentiate(rS, rdP, numbers(step));
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdV);
    ptx::wgmma_touch(rA);
    clear_unweighed(rdP, rS, query);
    pack<Element>(rdP, rA);
    d_queries_.write_d_scores(rA, step);
    issue_d_keys(rdK, rA, step, kFirst);
    typename QueryGradient<Element, Shape>::Own rdQ;
    if constexpr (!kFirst) d_queries_.issue(rdQ, step - 1, keys_stage());
    ptx::wgmma_claim(rdP);
    issue_d_weights(rdP, 1);
    ptx::wgmma_wait<kFirst ? 2 : 3>();
    ptx::wgmma_touch(rT);
    weigh_in_turn(rT, step, 1);
    mask(rT, query, 1);
    ptx::wgmma_wait<kFirst ? 1 : 2>();
    ptx::wgmma_touch(rdK);
    ptx::wgmma_touch(rA);
    pack<Element>(rT, rA);
    issue_d_values(rdV, rA, false, 1);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<2>();
      d_queries_.put(rdQ, step - 1);
      d_queries_.tell_sums(step - 1);
    }
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdP);
    if constexpr (kLast) release(&smem_.values.empty[0][0], thread_);
    advance();
    if constexpr (!kLast) {
      wait_for_queries();
      issue_scores(rS);
    }
    weighing_.differentiate(rT, rdP, numbers(step, 1));
    release(&smem_.numbers.empty[Place<Shape::kRowStages>{step}.stage()][0], thread_);
    ptx::wgmma_wait<kLast ? 0 : 1>();
    ptx::wgmma_touch(rdV);
    ptx::wgmma_touch(rA);
    release(&smem_.outs.empty[Place<Shape::kOutStages>{step}.stage()][0], thread_);
    clear_unweighed(rdP, rT, query);
    pack<Element>(rdP, rA);
    d_queries_.write_d_scores(rA, step, 1);
    d_queries_.tell_d_scores(step);
    issue_d_keys(rdK, rA, step, false, 1);
    if constexpr (!kLast) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_touch(rS);
      wait_until_full(smem_.numbers, steps_);
      weigh_in_turn(rS, steps_, 0);
    }
    end_step<kLast>(rdK, rA, rS, rdQ, step);
  }

  // Its last product is waited for. Behind a tile's last step there is no other that has its gradient of
  // queries as well.
  template <bool kLast>
  __device__ __forceinline__ void end_step(float (&rdK)[kKeyGradient], uint32_t (&rA)[kQuerySteps][4],
                                           float (&rS)[kPairs],
                                           typename QueryGradient<Element, Shape>::Own& rdQ, int step) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rdK);
    ptx::wgmma_touch(rA);
    release(&smem_.queries.empty[Place<Shape::kQueryStages>{step}.stage()][0], thread_);
    if constexpr (kLast) {
      d_queries_.issue(rdQ, step, keys_stage());
      ptx::wgmma_wait<0>();
      release(&smem_.keys.empty[keys_stage()][0], thread_);
      d_queries_.put(rdQ, step);
      d_queries_.tell_sums(step);
    } else {
      mask(rS, query_);  // here registers are free
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void zero(float (&d)[kCount]) {
#pragma unroll
    for (float& x : d) x = 0.0f;
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
    clear_others(smem_.sQ[Place<Shape::kQueryStages>{steps_}.stage()]);
  }
  __device__ __forceinline__ void wait_for_outs() {
    wait_until_full(smem_.outs, steps_);
    clear_others(smem_.sdO[Place<Shape::kOutStages>{steps_}.stage()]);
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

  __device__ __forceinline__ auto& queries(int step, int part) {
    return smem_.sQ[Place<Shape::kQueryStages>{step}.stage()][0][part * kFragmentRows];
  }
  __device__ __forceinline__ auto& outs(int step, int part) {
    return smem_.sdO[Place<Shape::kOutStages>{step}.stage()][0][part * kFragmentRows];
  }
  __device__ __forceinline__ void issue_scores(float (&rS)[kPairs], int part = 0) {
    multiply_rows<Element, Shape::kDim, kKeyPieceBytes, kQueryPieceBytes>(
        rS, smem_.sK[keys_stage()][0][warpgroup_ * kFragmentRows], queries(steps_, part));
  }
  __device__ __forceinline__ void issue_d_weights(float (&rdP)[kPairs], int part = 0) {
    multiply_rows<Element, Shape::kValueDim, kKeyPieceBytes, kQueryPieceBytes>(
        rdP, smem_.sV[0][warpgroup_ * kFragmentRows], outs(steps_, part));
  }
  __device__ __forceinline__ void issue_d_values(float (&rdV)[kValueGradient], uint32_t (&rP)[kQuerySteps][4],
                                                 bool first, int part = 0) {
    add_product<Element, kQueryPieceBytes>(rdV, rP, outs(steps_, part), first);
  }
  __device__ __forceinline__ void issue_d_keys(float (&rdK)[kKeyGradient], uint32_t (&rdS)[kQuerySteps][4],
                                               int step, bool first, int part = 0) {
    add_product<Element, kQueryPieceBytes>(rdK, rdS, queries(step, part), first);
  }

  __device__ __forceinline__ bool is_open(int query) const {
    return __builtin_expect(query >= open_.begin && query < open_.end, true);
  }
  // Where not all pairs of a step count.
  __device__ __forceinline__ void mask(float (&d)[kPairs], int query, int part = 0) const {
    if (is_open(query)) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = query * kQueries + part * kFragmentRows;
    Seen<Side::kKeys>(params_, tile, first, warpgroup_ * kFragmentRows, at_).mask(d);
    if (tile.q_rank >= 0) mask_others<Side::kQueries>(d, params_, tile, first, thread_ % 32, at_.in_quad);
  }

  // The same of gradients beside weights that are masked: what has no weight has no gradient, whatever it is.
  __device__ __forceinline__ void clear_unweighed(float (&rdP)[kPairs], const float (&rP)[kPairs],
                                                  int query) const {
    if (is_open(query)) return;
#pragma unroll
    for (int r = 0; r < kPairs; ++r) rdP[r] = rP[r] == 0.0f ? 0.0f : rdP[r];
  }

  __device__ __forceinline__ OfColumns<kQueries> numbers(int step, int part = 0) const {
    return {smem_.rows[Place<Shape::kRowStages>{step}.stage()], at_, part * kFragmentRows};
  }
  __device__ __forceinline__ void weigh(float (&rS)[kPairs]) {
    wait_until_full(smem_.numbers, steps_);
    tilt(rS);
    weighing_.weigh(rS, numbers(steps_));
  }
  // Of the step at hand.
  __device__ __forceinline__ void tilt(float (&rS)[kPairs], int part = 0) const {
    if (!weighing_.tilted()) return;
    const Tile& tile = smem_.tiles[told().stage()];
    const int key = tile.first + warpgroup_ * kFragmentRows + at_.row(0);
    const int place = query_ * kQueries + part * kFragmentRows + at_.column(0) + tile.band.offset;
    weighing_.tilt(rS, smem_.rows[Place<Shape::kRowStages>{steps_}.stage()].slope, key - place);
  }

  // One math warpgroup at a time: exponentials of both at once take each twice as long, and products wait.
  __device__ __forceinline__ void weigh_in_turn(float (&rS)[kPairs], int step, int part) {
    ptx::named_barrier_sync(kTurn + warpgroup_, Shape::kConsumerThreads);
    ptx::wgmma_touch(rS);
    tilt(rS, part);
    weighing_.weigh(rS, numbers(step, part));
    ptx::wgmma_touch(rS);
    ptx::named_barrier_arrive(kTurn + 1 - warpgroup_, Shape::kConsumerThreads);
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
