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
#include "attention/sm90/backward/seen.h"
#include "attention/sm90/backward/smem_plan.h"
#include "attention/sm90/backward/store.h"
#include "common/math.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"

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
        factor_((capped() ? params.softcap : params.scale) * kLog2E) {}

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
      release(&smem_.told.empty[told().stage()][0]);
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
    pack(rS, rA);
    issue_d_values(rdV, rA, kFirst);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(rdP);
    if constexpr (kLast) release(&smem_.values.empty[keys_stage()][0]);
    differentiate(rS, rdP);
    release(&smem_.numbers.empty[Place<kRowStages>{step}.stage()][0]);
    advance();
    if constexpr (!kLast) {
      wait_for_queries();
      issue_scores(rS);
    }
    ptx::wgmma_wait<kLast ? 0 : 1>();
    ptx::wgmma_touch(rdV);
    ptx::wgmma_touch(rA);
    release(&smem_.outs.empty[Place<kOutStages>{step}.stage()][0]);
    mask(rdP, query);
    pack(rdP, rA);
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
    release(&smem_.queries.empty[Place<kQueryStages>{step}.stage()][0]);
    if constexpr (kLast) {
      issue_d_queries(rdQ, step);
      ptx::wgmma_wait<0>();
      release(&smem_.keys.empty[keys_stage()][0]);
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

  // Through a shuffle the compiler knows that a value is the warp's.
  __device__ __forceinline__ static int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
  __device__ __forceinline__ static uint64_t descriptor(const void* tile, uint32_t leading_bytes) {
    return ptx::uniform_descriptor(ptx::wgmma_descriptor(tile, leading_bytes));
  }

  // d = rows of a times rows of b, over kDims.
  template <int kDims, uint32_t kPieceBytesA, uint32_t kPieceBytesB, int kCount>
  __device__ __forceinline__ static void multiply_rows(float (&d)[kCount], const void* a, const void* b) {
    const uint64_t left = descriptor(a, 0), right = descriptor(b, 0);
    ptx::wgmma_touch(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDims / kStepDims; ++step) {
      const uint32_t piece = step / kStepsPerPiece, within = step % kStepsPerPiece * kStepDims * 2;
      const uint64_t step_left = ptx::advance_descriptor(left, piece * kPieceBytesA + within);
      const uint64_t step_right = ptx::advance_descriptor(right, piece * kPieceBytesB + within);
      ptx::wgmma_k16<Element, ptx::kKMajor>(d, step_left, step_right, step > 0);
    }
    ptx::wgmma_commit();
  }

  // d += a times b, over queries.
  template <int kCount>
  __device__ __forceinline__ static void add_product(float (&d)[kCount], uint32_t (&a)[kQuerySteps][4],
                                                     const void* b, bool first) {
    const uint64_t right = descriptor(b, kQueryPieceBytes);
    ptx::wgmma_touch(d);
    ptx::wgmma_touch(a);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const auto& weights = static_cast<const uint32_t (&)[4]>(a[step]);
      const uint64_t step_right = ptx::advance_descriptor(right, step * kStepRowBytes);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(d, weights, step_right, !first || step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_scores(float (&rS)[kPairs]) {
    multiply_rows<Shape::kDim, kKeyPieceBytes, kQueryPieceBytes>(
        rS, smem_.sK[keys_stage()][0][warpgroup_ * kFragmentRows],
        smem_.sQ[Place<kQueryStages>{steps_}.stage()][0]);
  }
  __device__ __forceinline__ void issue_d_weights(float (&rdP)[kPairs]) {
    multiply_rows<Shape::kValueDim, kKeyPieceBytes, kQueryPieceBytes>(
        rdP, smem_.sV[keys_stage()][0][warpgroup_ * kFragmentRows],
        smem_.sdO[Place<kOutStages>{steps_}.stage()][0]);
  }
  __device__ __forceinline__ void issue_d_values(float (&rdV)[accumulators(Shape::kValueDim)],
                                                 uint32_t (&rP)[kQuerySteps][4], bool first) {
    add_product(rdV, rP, smem_.sdO[Place<kOutStages>{steps_}.stage()][0], first);
  }
  __device__ __forceinline__ void issue_d_keys(float (&rdK)[accumulators(Shape::kDim)],
                                               uint32_t (&rdS)[kQuerySteps][4], int step, bool first) {
    add_product(rdK, rdS, smem_.sQ[Place<kQueryStages>{step}.stage()][0], first);
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

  __device__ __forceinline__ const Rows<kQueries>& rows() const {
    return smem_.rows[Place<kRowStages>{steps_}.stage()];
  }
  // Maximum and rest of the columns of registers r to r + 3, as they lie.
  __device__ __forceinline__ float4 lse_of(int r) const {
    return *reinterpret_cast<const float4*>(rows().lse[r + at_.in_quad]);
  }

  // Weights of the step's scores.
  __device__ __forceinline__ void weigh(float (&rS)[kPairs]) {
    wait_until_full(smem_.numbers, steps_);
    if (capped()) cap(rS, 2.0f * kLog2E * params_.scale / params_.softcap);
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      const float4 lse = lse_of(r);
#pragma unroll
      for (int j = r; j < r + 4; j += 2) {
        rS[j] = exp2_fast(fmaf(factor_, rS[j] - lse.x, -lse.z));
        rS[j + 1] = exp2_fast(fmaf(factor_, rS[j + 1] - lse.y, -lse.w));
      }
    }
  }

  // Of gradients of the step's weights, those of its scores.
  __device__ __forceinline__ void differentiate(const float (&rS)[kPairs], float (&rdP)[kPairs]) const {
#pragma unroll
    for (int r = 0; r < kPairs; r += 8) {
      const auto d = *reinterpret_cast<const float4*>(rows().delta[r / 2 + at_.in_quad]);
#pragma unroll
      for (int j = r; j < r + 8; j += 2) {
        rdP[j] = rS[j] * (rdP[j] - (j < r + 4 ? d.x : d.z));
        rdP[j + 1] = rS[j + 1] * (rdP[j + 1] - (j < r + 4 ? d.y : d.w));
      }
    }
    if (capped()) bend(rS, rdP);
  }

  __device__ __forceinline__ bool capped() const { return params_.softcap > 0.0f; }
  // Scores become the hyperbolic tangent of what the soft cap makes of them, by exponentials: the hardware's
  // is exact to 2^-11 only. `twice2` makes twice the argument, base 2.
  __device__ __forceinline__ static void cap(float (&rS)[kPairs], float twice2) {
#pragma unroll
    for (float& x : rS) x = 1.0f - __fdividef(2.0f, exp2_fast(fminf(x * twice2, 126.0f)) + 1.0f);
  }
  // Gradients of capped scores become those of scores: times one less the square of what was capped, which is
  // found again from its weight.
  __device__ __forceinline__ void bend(const float (&rS)[kPairs], float (&rdP)[kPairs]) const {
    const float inverse = 1.0f / factor_;
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const float4 lse = lse_of(r / 4 * 4);
      const float maximum = r % 2 ? lse.y : lse.x, rest = r % 2 ? lse.w : lse.z;
      const float capped = fmaf(log2_fast(rS[r]) + rest, inverse, maximum);
      rdP[r] = rS[r] == 0.0f ? 0.0f : rdP[r] * fmaf(-capped, capped, 1.0f);
    }
  }

  __device__ __forceinline__ static void pack(const float (&d)[kPairs], uint32_t (&packed)[kQuerySteps][4]) {
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      constexpr float kOne[kRowsPerThread] = {1.0f, 1.0f};
      pack_step<Element>(d, step, kOne, packed[step]);
    }
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
    release(&smem_.scores.full[buffer][0]);
  }

  // A step's gradient of queries, which is done, to shared memory, once the one before has been read.
  __device__ __forceinline__ void put(Half& half, int step) {
    ptx::wgmma_touch(half.d);
    if constexpr (!Shape::kOnesBeside) ptx::wgmma_touch(half.counts);
    release(&smem_.scores.empty[Place<kScoreStages>{step}.stage()][0]);
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
    release(&smem_.added.full[Place<kAdders>{step}.stage()][0]);
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

  __device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (thread_ % 32 == 0) ptx::mbarrier_arrive(empty);
  }

  const BackwardParams& params_;
  Plan& smem_;
  const int warpgroup_;
  const int thread_;
  const FragmentPosition at_;
  const float factor_;

  int tiles_ = 0, steps_ = 0;  // opened before this one; of all tiles, before the one whose weights come next
  // The tile's query tiles, those in which all pairs count, and the step's; steps that are left with it.
  Span queries_, open_;
  int query_, left_;
};

}  // namespace pallas_attn::attention::sm90::backward
