// What a run has come to, and where it goes: to the output, or as a partial result to memory. A thread has
// eight neighbouring columns of every query row it holds: 16 bytes of the output, and eight lanes a whole
// line.
#pragma once

#include "mla/sm90/transposed/query.h"
#include "mla/sm90/transposed/softmax.h"
#include "ptx/cache.h"

namespace pallas_attn::mla::sm90::transposed {

// `Tokens` says whether rows may have sinks (all_tokens.h, chosen_tokens.h).
template <typename Tokens, typename Plan>
class RunResult {
 public:
  static constexpr int kAccumulators = accumulators(Plan::kRows);

  PageRun& run;
  RowSums<Plan::kRows> sums;              // of this thread's tokens, until complete()
  float rO[kColumnTiles][kAccumulators];  // in the unit

  __device__ RunResult(const DecodeParams& params, Plan& smem, const Place& at)
      : run(smem.run[at.owner]), params_(params), smem_(smem), at_(at) {}

  // Behind the last product: sums become those of the run, in both warpgroups the same.
  __device__ __forceinline__ void complete() {
    const Place at = at_.anew();
    sums.reduce(at.lane);
#pragma unroll
    for (int i = 0; i < sums.kSums; ++i) {
      smem_.warp_sum[at_.owner * kWarpgroupWarps + at_.warp][sums.row(at, i)] = sums.of_row[i];
    }
    // Told to all threads, though only the first ones' numbers are those of rows. Else the compiler keeps,
    // all through a run, what the others had before.
    const int row = at.thread() % Plan::kRows;
    // Behind the barrier the other warpgroup may load the next run's query.
    const float factor = smem_.row_factor[row];
    ptx::named_barrier_sync(kSumsReady, kConsumerThreads);
    unit_ = smem_.unit;
    sum_ = run.bad_length && run.num_pages() == 0 ? NAN : 0.0f;
#pragma unroll
    for (int warp = 0; warp < kOwners * kWarpgroupWarps; ++warp) sum_ += smem_.warp_sum[warp][row];
    base_ = in_base_2(smem_.base[row], sum_, factor, left_).maximum;
  }

  // Other CTAs may wait for a partial result or not: it is stored in one way.
  __device__ __forceinline__ void store(bool) {
    share_factors();
    const uint64_t policy = ptx::l2_evict_last_policy();
    const bool final = run.partial < 0;
    const int64_t first = first_element(final ? run.request : run.partial);
    auto* out = static_cast<__nv_bfloat16*>(params_.out) + first;
    float* partial = params_.partial_out + first;
    const bool second = ptx::lane() & kNeighbour;
    visit_rows([&](int row, bool exists, const float (&v)[kColumns]) {
      if (!final) {
        store_partial(partial + row * kLatentDim, exists, second, v, policy);
      } else if (exists) {
        store_out(out + row * kLatentDim, v, policy);
      }
    });
  }

  // What a request's first split has come to, whether or not others were added.
  __device__ __forceinline__ void store_final(bool) {
    if (at_.anew().thread() == 0) run.partial = -1;
    meet_within(at_.owner);
    store(true);
  }

  // Adds the other splits' partial results to that of a request's first one.
  __device__ __forceinline__ void add_partials() {
    for (int split = 1; split < run.kept_splits; ++split) {
      const int partial = min(run.partial + split, params_.num_partials() - 1);
      const int row = at_.anew().thread();
      if (row < Plan::kRows) {
        const RowLse lse =
            row < rows_left() ? params_.partial_lse[row_of_all(partial, row)] : RowLse{-INFINITY, 0.0f};
        const float top = fmaxf(base_, lse.maximum);
        const float own = exp2_fast(base_ - top) * left_, others = exp2_fast(lse.maximum - top) * lse.total;
        base_ = top;
        left_ = 1.0f;
        sum_ = sum_ * own + others;
        smem_.out_factor[at_.owner][row] = own * unit_;
        smem_.others_factor[at_.owner][row] = others;
      }
      const Place at = at_.anew();
      unit_ = 1.0f;  // partial results are in none
      meet_within(at_.owner);
      const float* from = params_.partial_out + first_element(partial);
      const int left = rows_left() - at.row(0);
      visit_row_pairs<Plan::kRows>([&](int j) {
        const float2 own = smem_.out_factor[at_.owner].pair(at.row(j));
        const float2 others = smem_.others_factor[at_.owner].pair(at.row(j));
        if (j * 8 < left) add_row(from + j * 8 * kLatentDim, j, 0, own.x, others.x);
        if (j * 8 + 1 < left) add_row(from + (j * 8 + 1) * kLatentDim, j, 1, own.y, others.y);
      });
      // This warp has read its 256 bytes of every row; and factors may be written again.
      meet_within(at_.owner);
      for (int line = ptx::lane(); line < rows_left() * kLinesOfWarp && line < Plan::kRows * kLinesOfWarp;
           line += 32) {
        const float* part =
            place().partial_row(params_, partial, line / kLinesOfWarp) + at_.warp * kWarpColumns;
        ptx::discard_line(part + line % kLinesOfWarp * (kWarpColumns / kLinesOfWarp));
      }
    }
  }

 private:
  static constexpr int kNeighbour = 4;  // as many lanes on, the next columns of the same rows
  static constexpr int kLinesOfWarp = kWarpColumns * sizeof(float) / ptx::kLineBytes;

  // What the thread of a row knows becomes what all threads multiply by; the row's log-sum-exp is stored.
  __device__ __forceinline__ void share_factors() {
    const int row = at_.anew().thread();
    if (row < Plan::kRows) {
      const bool empty = sum_ == 0.0f;  // false for NaN, which must survive
      float factor = empty ? 0.0f : unit_ / sum_;
      const RowLse lse = {empty ? -INFINITY : base_, sum_ * left_};
      if constexpr (Tokens::kHasSinks) {
        // What is final makes room for the row's sink.
        if (params_.sinks != nullptr && run.partial < 0 && row < rows_left()) {
          factor *= share_beside_sink(lse, params_.sinks[row_of_all(0, row)]);
        }
      }
      smem_.out_factor[at_.owner][row] = factor;
      if (at_.owner == 0 && row < rows_left()) {
        if (run.partial < 0) {
          *params_.lse_of(run.request, place().kv_head, place().first_row() + row) = log2_of(lse) * kLn2;
        } else {
          params_.partial_lse[row_of_all(run.partial, row)] = lse;
        }
      }
    }
    meet_within(at_.owner);
  }

  // This thread's accumulators of a row, column by column: register r of a tile is column r / 2 % 2 of it.
  __device__ __forceinline__ float& column(int c, int j, int right) {
    return rO[c / kRowsPerThread][j * 4 + c % kRowsPerThread * 2 + right];
  }

  __device__ __forceinline__ OutputPlace place() const { return place_of_block(at_.owner); }
  __device__ __forceinline__ int rows_left() const { return place().rows_left(params_); }

  // Among all rows of the output or of the partial results. The row is unsigned, or the compiler keeps the
  // upper half of its 64 bits in a register.
  __device__ __forceinline__ int64_t row_of_all(int request_or_partial, uint32_t row) const {
    return place().row(params_, request_or_partial) + row;
  }

  // Of the output, or of the partial results: this thread's first column of its first row.
  __device__ __forceinline__ int64_t first_element(int request_or_partial) const {
    const Place at = at_.anew();
    int64_t first =
        row_of_all(request_or_partial, at.row(0)) * kLatentDim + static_cast<uint32_t>(at.column());
    // Kept, or the compiler works it out again for every row, from what it has spilled.
    asm volatile("" : "+l"(first));
    return first;
  }

  // visit(row, whether there is one, columns); rows are counted from this thread's first.
  template <typename Visit>
  __device__ __forceinline__ void visit_rows(Visit visit) {
    const Place at = at_.anew();
    const int left = rows_left() - at.row(0);
    visit_row_pairs<Plan::kRows>([&](int j) {
      const float2 factors = smem_.out_factor[at_.owner].pair(at.row(j));
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const float factor = right == 0 ? factors.x : factors.y;
        float v[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) v[c] = column(c, j, right) * factor;
        visit(j * 8 + right, j * 8 + right < left, v);
      }
    });
  }

  static __device__ __forceinline__ uint4 as_words(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
  }

  static __device__ __forceinline__ void store_out(__nv_bfloat16* to, const float (&v)[kColumns],
                                                   uint64_t policy) {
    using Traits = ElementTraits<__nv_bfloat16>;
    ptx::store_with_policy(to,
                           make_uint4(Traits::pack(v[0], v[1]), Traits::pack(v[2], v[3]),
                                      Traits::pack(v[4], v[5]), Traits::pack(v[6], v[7])),
                           policy);
  }

  // Half of a thread's columns at a time would be half of a sector each, and take as long as a whole one. So
  // two neighbours exchange halves, and both store what the first one had before what the second one had.
  static __device__ __forceinline__ void store_partial(float* to, bool exists, bool second,
                                                       const float (&v)[kColumns], uint64_t policy) {
    constexpr int kHalf = kColumns / 2;
    static_assert(kHalf == 4);
    float firsts[kHalf], seconds[kHalf];  // of the first one's columns, and of the second one's
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float others = __shfl_xor_sync(0xffffffff, second ? v[i] : v[i + kHalf], kNeighbour);
      firsts[i] = second ? others : v[i];
      seconds[i] = second ? v[i + kHalf] : others;
    }
    if (!exists) return;
    to += second ? kHalf - kColumns : 0;
    ptx::store_with_policy(to, as_words(firsts[0], firsts[1], firsts[2], firsts[3]), policy);
    ptx::store_with_policy(to + kColumns, as_words(seconds[0], seconds[1], seconds[2], seconds[3]), policy);
  }

  __device__ __forceinline__ void add_row(const float* from, int j, int right, float own, float others) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + c);
      column(c, j, right) = column(c, j, right) * own + v.x * others;
      column(c + 1, j, right) = column(c + 1, j, right) * own + v.y * others;
      column(c + 2, j, right) = column(c + 2, j, right) * own + v.z * others;
      column(c + 3, j, right) = column(c + 3, j, right) * own + v.w * others;
    }
  }

  const DecodeParams& params_;
  Plan& smem_;
  const Place at_;
  float unit_;
  // Of the row with this thread's number: the base in base 2, the sum, and by what it is multiplied then
  // (in_base_2).
  float base_, sum_, left_;
};

}  // namespace pallas_attn::mla::sm90::transposed
