// A math warpgroup: its 64 keys of every key tile against the queries that see them. Scores are [keys,
// queries], so that weights and their gradients meet queries from registers; for the gradient of queries both
// math warpgroups put theirs into shared memory, and each works out one half of it.
//
// The next step's scores are begun before this one's last products, and its weights worked out beside them;
// from one key tile to the next one, too.
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
  kWritten = 1,  // gradients of scores, by both math warpgroups
  kRead = 2,     // by the first one, and one more, by the second
  kCounted = 4,
  kCleared = 5,  // what nobody may see, by both
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
    if (!open()) return;
    float rdK[accumulators(Shape::kDim)], rdV[accumulators(Shape::kValueDim)];
    float rS[kPairs];
    uint32_t rA[kQuerySteps][4];  // weights, then gradients of scores: what meets queries
    wait_for_queries();
    issue_scores(rS);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(rS);
    weigh(rS);
    pass_read();
    bool first = true;
    while (true) {
      const int step = steps_, tile_stage = told().stage();
      float rdP[kPairs];
      issue_d_weights(rdP);
      pack(rS, rA);
      issue_d_values(rdV, rA, first);
      ptx::wgmma_wait<1>();
      ptx::wgmma_touch(rdP);
      differentiate(rS, rdP);
      const bool leaves = !step_.advance(smem_.tiles[tile_stage], params_.group);
      ++steps_;
      bool more = true;
      if (leaves) {
        release(&smem_.values.empty[0][0]);
        ++tiles_;
        more = open();
      }
      if (more) wait_for_queries();
      // Of whatever is there, if there are no more.
      issue_scores(rS);
      ptx::wgmma_wait<1>();
      ptx::wgmma_touch(rdV);
      ptx::wgmma_touch(rA);
      release(&smem_.outs.empty[step % kOutStages][0]);
      pack(rdP, rA);
      write_d_scores(rA);
      issue_d_keys(rdK, rA, step % kQueryStages, first);
      ptx::named_barrier_sync(kWritten, Shape::kConsumerThreads);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rS);
      ptx::wgmma_touch(rdK);
      ptx::wgmma_touch(rA);
      float rdQ[kOwn], rC[4];
      issue_d_queries(rdQ, rC, tile_stage);
      if (more) weigh(rS);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rdQ);
      ptx::wgmma_touch(rC);
      release(&smem_.queries.empty[step % kQueryStages][0]);
      if (more) pass_read();
      add(tile_stage, rdQ, rC);
      first = leaves;
      if (leaves) {
        release(&smem_.keys.empty[tile_stage][0]);
        store(smem_.tiles[tile_stage], rdK, rdV);
        release(&smem_.told.empty[tile_stage][0]);
      }
      if (!more) return;
    }
  }

 private:
  static constexpr int kQueries = Shape::kQueries;
  static constexpr int kPairs = accumulators(kQueries);  // of scores
  static constexpr int kQuerySteps = kQueries / kStepDims;
  static constexpr int kOwn = accumulators(Shape::kOwnDims);  // of a query tile's gradient
  static constexpr uint32_t kKeyPieceBytes = Shape::kKeys * kRowBytes;
  static constexpr uint32_t kQueryPieceBytes = kQueries * kRowBytes;
  static constexpr uint32_t kStepRowBytes = kStepDims * kRowBytes;

  __device__ __forceinline__ Place<kToldTiles> told() const { return {tiles_}; }
  __device__ __forceinline__ Place<kKeyStages> keys() const { return {tiles_}; }
  __device__ __forceinline__ Place<kQueryStages> queries() const { return {steps_}; }
  __device__ __forceinline__ Place<kOutStages> outs() const { return {steps_}; }

  // Waits for a key tile; false if there are no more.
  __device__ __forceinline__ bool open() {
    ptx::mbarrier_wait(&smem_.told.full[told().stage()][0], told().full());
    const Tile& tile = smem_.tiles[told().stage()];
    if (uniform(tile.kv_head) < 0) return false;
    step_ = Step(tile);
    step_.query = uniform(step_.query);
    ptx::mbarrier_wait(&smem_.keys.full[keys().stage()][0], keys().full());
    if (__builtin_expect(
            has_others(tile.held_keys, tile.first, Shape::kKeys, tile.key, params_.kv_len, tile.k_rank),
            false)) {
      clear(smem_.sK[keys().stage()], [&](int row) { return tile.holds_key(params_, tile.first + row); });
    }
    return true;
  }
  __device__ __forceinline__ void wait_for_queries() {
    ptx::mbarrier_wait(&smem_.queries.full[queries().stage()][0], queries().full());
    clear_others(smem_.sQ[queries().stage()]);
  }

  // Of a step's queries, or of their gradients of out.
  template <typename Pieces>
  __device__ __forceinline__ void clear_others(Pieces& pieces) {
    const Tile& tile = smem_.tiles[told().stage()];
    const int first = step_.query * kQueries;
    if (is_open(tile)) return;
    if (!has_others(tile.held_queries, first, kQueries, tile.query, params_.q_len, tile.q_rank)) return;
    clear(pieces, [&](int row) { return tile.holds_query(params_, first + row); });
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
        rS, smem_.sK[keys().stage()][0][warpgroup_ * kFragmentRows], smem_.sQ[queries().stage()][0]);
  }
  __device__ __forceinline__ void issue_d_weights(float (&rdP)[kPairs]) {
    ptx::mbarrier_wait(&smem_.values.full[0][0], tiles_ & 1);
    ptx::mbarrier_wait(&smem_.outs.full[outs().stage()][0], outs().full());
    clear_others(smem_.sdO[outs().stage()]);
    multiply_rows<Shape::kValueDim, kKeyPieceBytes, kQueryPieceBytes>(
        rdP, smem_.sV[0][warpgroup_ * kFragmentRows], smem_.sdO[outs().stage()][0]);
  }
  __device__ __forceinline__ void issue_d_values(float (&rdV)[accumulators(Shape::kValueDim)],
                                                 uint32_t (&rP)[kQuerySteps][4], bool first) {
    add_product(rdV, rP, smem_.sdO[outs().stage()][0], first);
  }
  __device__ __forceinline__ void issue_d_keys(float (&rdK)[accumulators(Shape::kDim)],
                                               uint32_t (&rdS)[kQuerySteps][4], int stage, bool first) {
    add_product(rdK, rdS, smem_.sQ[stage][0], first);
  }

  // The warpgroup's columns of the step's gradient of queries; and of its keys the sums of what is multiplied
  // with them.
  __device__ __forceinline__ void issue_d_queries(float (&rdQ)[kOwn], float (&rC)[4], int stage) {
    const uint64_t left = descriptor(smem_.sdS[0], 0);
    const uint64_t right = ptx::advance_descriptor(
        descriptor(smem_.sK[stage][warpgroup_ * Shape::kOwnDims / kPieceDims], kKeyPieceBytes),
        warpgroup_ * Shape::kOwnDims % kPieceDims * sizeof(uint16_t));
    const uint64_t ones = descriptor(smem_.ones, 0);
    ptx::wgmma_touch(rdQ);
    ptx::wgmma_touch(rC);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / kStepDims; ++step) {
      const uint32_t piece = step / kStepsPerPiece, within = step % kStepsPerPiece * kStepDims * 2;
      const uint64_t step_left = ptx::advance_descriptor(left, piece * kQueryPieceBytes + within);
      const uint64_t step_right = ptx::advance_descriptor(right, step * kStepRowBytes);
      ptx::wgmma_k16<Element, ptx::kMNMajor>(rdQ, step_left, step_right, step > 0);
    }
#pragma unroll
    for (int step = 0; step < kFragmentRows / kStepDims; ++step) {
      const uint64_t step_left =
          ptx::advance_descriptor(left, warpgroup_ * kQueryPieceBytes + step * kStepDims * 2);
      ptx::wgmma_k16<Element, ptx::kKMajor>(rC, step_left, ones, step > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ bool is_open(const Tile& tile) const {
    return __builtin_expect(step_.query >= tile.open.begin && step_.query < tile.open.end, true);
  }
  // Where not all pairs of a step count.
  __device__ __forceinline__ void mask(const Tile& tile, float (&d)[kPairs]) const {
    if (is_open(tile)) return;
    const int first = step_.query * kQueries;
    Seen(params_, tile, first, warpgroup_ * kFragmentRows, at_).mask(d);
    if (tile.q_rank >= 0) mask_others(d, params_, tile, first, thread_ % 32, at_.in_quad);
  }

  // Weights of the step's scores.
  __device__ __forceinline__ void weigh(float (&rS)[kPairs]) const {
    const Tile& tile = smem_.tiles[told().stage()];
    const auto& rows = smem_.rows[queries().stage()];
    if (capped()) cap(rS, 2.0f * kLog2E * params_.scale / params_.softcap);
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      const float2 maximum = pair_of(rows.maximum, r), rest = pair_of(rows.rest, r);
#pragma unroll
      for (int j = r; j < r + 4; j += 2) {
        rS[j] = exp2_fast(fmaf(factor_, rS[j] - maximum.x, -rest.x));
        rS[j + 1] = exp2_fast(fmaf(factor_, rS[j + 1] - maximum.y, -rest.y));
      }
    }
    mask(tile, rS);
  }

  // Of gradients of the step's weights, those of its scores.
  __device__ __forceinline__ void differentiate(const float (&rS)[kPairs], float (&rdP)[kPairs]) const {
    const Tile& tile = smem_.tiles[told().stage()];
    const auto& rows = smem_.rows[queries().stage()];
#pragma unroll
    for (int r = 0; r < kPairs; r += 4) {
      const float2 delta = pair_of(rows.delta, r);
#pragma unroll
      for (int j = r; j < r + 4; j += 2) {
        rdP[j] = rS[j] * (rdP[j] - delta.x);
        rdP[j + 1] = rS[j + 1] * (rdP[j + 1] - delta.y);
      }
    }
    if (capped()) bend(rS, rdP, rows);
    mask(tile, rdP);
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
  __device__ __forceinline__ void bend(const float (&rS)[kPairs], float (&rdP)[kPairs],
                                       const Rows<kQueries>& rows) const {
    const float inverse = 1.0f / factor_;
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const int query = r / 4 * 8 + at_.in_quad * 2 + r % 2;
      const float capped = fmaf(log2_fast(rS[r]) + rows.rest[query], inverse, rows.maximum[query]);
      rdP[r] = rS[r] == 0.0f ? 0.0f : rdP[r] * fmaf(-capped, capped, 1.0f);
    }
  }

  // Those of the two queries of registers r and r + 1.
  __device__ __forceinline__ float2 pair_of(const float (&of_rows)[kQueries], int r) const {
    return *reinterpret_cast<const float2*>(of_rows + r / 4 * 8 + at_.in_quad * 2);
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
  __device__ __forceinline__ void write_d_scores(const uint32_t (&rdS)[kQuerySteps][4]) {
    ptx::named_barrier_sync(kRead + 1 - warpgroup_, Shape::kConsumerThreads);
    const int lane = thread_ % 32, row = lane % 8 + lane / 16 * 8;
    const int chunk = at_.warp * 2 + lane / 8 % 2;
    const uint32_t to = ptx::shared_address(smem_.sdS[warpgroup_][row]) + ((chunk ^ lane % 8) << 4);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      ptx::store_matrix_x4_transposed(to + step * kStepRowBytes, rdS[step]);
    }
    ptx::fence_async_shared();
  }
  // The other math warpgroup may write its gradients of scores again.
  __device__ __forceinline__ void pass_read() {
    ptx::named_barrier_arrive(kRead + warpgroup_, Shape::kConsumerThreads);
  }

  // To what is there of the query tile's gradient; the last one stores it.
  __device__ __forceinline__ void add(int stage, float (&rdQ)[kOwn], float (&rC)[4]) {
    // The turn of the step behind which the next one has begun.
    const Place<kTurnStages> turns = {steps_ - 1};
    ptx::mbarrier_wait(&smem_.turns.full[turns.stage()][0], turns.full());
    const Turn& turn = smem_.turn[turns.stage()];
    const Tile& tile = smem_.tiles[stage];
    const int head = uniform(turn.head), first_query = uniform(turn.query) * kQueries;
    const bool first = uniform(turn.first), last = uniform(turn.last);
    const auto has = [&](int row) { return tile.has_query(params_, first_query + row); };
    const int64_t row =
        (int64_t{tile.batch} * params_.num_heads + head) * params_.q_len + tile.query + first_query;
    const bool whole = first_query + kQueries <= tile.band.q_len && tile.q_rank < 0;
    const Sums<Shape> sums(params_, row, whole, warpgroup_, thread_, at_, has);
    if (last) {
      if (!first) sums.take(rdQ, rC);
      settle(stage, row, rdQ, rC, has);
      const int64_t place = tile.batch * params_.query_strides.batch + head * params_.query_strides.head +
                            (tile.query + first_query) * params_.query_strides.token +
                            warpgroup_ * Shape::kOwnDims;
      store_rows<Element>(params_.d_query, place, params_.query_strides.token,
                          params_.head_dim - warpgroup_ * Shape::kOwnDims, rdQ, params_.scale, at_, has);
    } else if (first) {
      sums.put(rdQ, rC);
    } else {
      sums.add(rdQ, rC);
    }
    release(&smem_.turns.empty[turns.stage()][0]);
  }

  // What rounding made of the sum over keys of gradients of scores, times what keys have in common, is taken
  // back (pallas_attn/_tile/weights.py). Not of capped scores, whose sum is not known.
  template <typename Has>
  __device__ __forceinline__ void settle(int stage, int64_t row, float (&rdQ)[kOwn], float (&rC)[4],
                                         Has has) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (at_.in_quad == 0) smem_.counts[warpgroup_][at_.row(i)] = rC[i * 2];
    }
    ptx::named_barrier_sync(kCounted, Shape::kConsumerThreads);
    float excess[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float counted = rC[i * 2] + smem_.counts[1 - warpgroup_][at_.row(i)];
      excess[i] = has(at_.row(i)) && !capped() ? counted - __ldg(params_.total + row + at_.row(i)) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const float mean = smem_.mean[stage][warpgroup_ * Shape::kOwnDims + at_.column(r)];
      rdQ[r] = fmaf(-excess[FragmentPosition::row_of(r)], mean, rdQ[r]);
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, const float (&rdK)[accumulators(Shape::kDim)],
                                        const float (&rdV)[accumulators(Shape::kValueDim)]) const {
    const int first = tile.first + warpgroup_ * kFragmentRows;
    const auto has = [&](int row) { return tile.has_key(params_, first + row); };
    const auto place = [&](const Strides& strides) {
      return tile.batch * strides.batch + tile.kv_head * strides.head + (tile.key + first) * strides.token;
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

  int tiles_ = 0, steps_ = 0;  // that have been opened, and whose weights are worked out, less one
  // Whose weights come next.
  Step step_;
};

}  // namespace pallas_attn::attention::sm90::backward
