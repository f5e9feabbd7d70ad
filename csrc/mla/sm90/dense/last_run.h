// What becomes of a part's last run, when shared memory is free.
#pragma once

#include <cuda.h>

#include "mla/sm90/dense/smem_plan.h"
#include "mla/sm90/dense/store.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

template <typename Element>
class LastRun {
 public:
  __device__ LastRun(const DecodeParams& params, SmemPlan& smem, const CUtensorMap& out_map,
                     const OutputPlace& place, int thread, RunResult& result)
      : params_(params),
        smem_(smem),
        out_map_(out_map),
        place_(place),
        at_(thread),
        lane_(thread % 32),
        rows_left_(place.rows_left(params)),
        result_(result) {}

  // `awaited`: other CTAs wait for a partial result.
  __device__ __forceinline__ void store(bool awaited) const { store(awaited, params_.scale * kLog2E); }

  // Adds the other splits' partial results to that of a request's first one.
  __device__ __forceinline__ void add_partials() {
    PartialStage& stage = smem_.partial_stage();
    const int rows = min(rows_left_ - first_row_of_warp(), kWarpRows);
    if (rows > 0) {
      to_base_2();
      uint64_t* full = &smem_.partial_full[place_.half][at_.warp];
      ptx::fence_async_global();
      for (int split = 1; split < result_.run.kept_splits; ++split) {
        const int partial = min(result_.run.partial + split, params_.num_partials() - 1);
        if (lane_ == 0) ptx::mbarrier_arrive_expect_bytes(full, rows * kHalfDims * sizeof(float));
        __syncwarp();
        if (lane_ < rows) {
          const int row = first_row_of_warp() + lane_;
          ptx::bulk_load(stage.rows[place_.half][row], place_.partial_row(params_, partial, row),
                         kHalfDims * sizeof(float), full);
        }
        add_split(partial, full, (split - 1) & 1);
        if (lane_ < rows) {
          char* row =
              reinterpret_cast<char*>(place_.partial_row(params_, partial, first_row_of_warp() + lane_));
#pragma unroll
          for (int line = 0; line < kHalfDims * 4 / ptx::kLineBytes; ++line)
            ptx::discard_line(row + line * ptx::kLineBytes);
        }
        // The next one overwrites what was just read.
        ptx::fence_async_shared();
        __syncwarp();
      }
    }
  }

  // What a request's first split has come to. `merging`: others were added, if there were any.
  __device__ __forceinline__ void store_final(bool merging) {
    result_.run.partial = -1;
    store(true, merging ? 1.0f : params_.scale * kLog2E);
  }

 private:
  // `scale_log2`: what makes base 2 of the state's maxima.
  __device__ __forceinline__ void store(bool awaited, float scale_log2) const {
    const PageRun& run = result_.run;
    const RowEnds ends = ends_of(params_, place_, run, at_, result_.state, scale_log2);
    if (first_row_of_warp() >= rows_left_) return;
    if (run.partial < 0) {
      stage_final(ends.factor);
    } else if (awaited) {
      stage_partial(ends.factor);
    } else {
      // Few rows, read at once by the merging kernel: the L2's policy would cost more than it gains.
      store_partial(result_.rO, at_, ends.factor, params_, place_, run.partial,
                    [](float* to, float2 v) { *reinterpret_cast<float2*>(to) = v; });
    }
    store_lse(params_, place_, run, at_, ends.lse);
  }

  __device__ int first_row_of_warp() const { return at_.warp * kWarpRows; }

  // Through shared memory and the copy engine, a quarter of the instructions of store_final. Each warp stages
  // its own 16 rows in the query's place, so nobody may need the query any more.
  __device__ __forceinline__ void stage_final(const float (&factor)[kRowsPerThread]) const {
    const int first = first_piece(place_.half);
#pragma unroll
    for (int step = 0; step < kHalfDims / kStepDims; ++step) {
      uint32_t v[4];
      pack_step<Element>(result_.rO, step, factor, v);
      const SmemPlan::Piece& piece = smem_.sQ[first + step / kStepsPerPiece];
      ptx::store_matrix_x4(matrix_address(piece, at_.warp, lane_, step % kStepsPerPiece), v);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane_ != 0) return;
    // What comes next reads it. And while it stays in the L2, its writes do not disturb the reads of pages.
    const uint64_t policy = ptx::l2_evict_last_policy();
#pragma unroll 1
    for (int piece = first; piece < first + kHalfPieces; ++piece) {
      // Rows past the request's last are outside the map, which the copy engine leaves out.
      ptx::tma_store_3d(&out_map_, smem_.sQ[piece][first_row_of_warp()], policy, piece * kPieceDims,
                        place_.first_row() + first_row_of_warp(),
                        result_.run.request * params_.num_kv_heads + place_.kv_head);
    }
    ptx::close_stores();
    ptx::wait_until_stores_have_read();
  }

  // A row of the half's 256 columns is one run of bytes to the copy engine, where a warp's stores and loads
  // would be eight crumbs of 32 bytes. Worth it for all rows of a tile behind which everybody waits, not for
  // few.
  __device__ __forceinline__ void stage_partial(const float (&factor)[kRowsPerThread]) const {
    PartialStage& stage = smem_.partial_stage();
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      float* row = &stage.rows[place_.half][at_.row(i)][at_.in_quad * 2];
      visit_pairs(result_.rO, i, [&](int column, float left, float right) {
        *reinterpret_cast<float2*>(row + column) = make_float2(left * factor[i], right * factor[i]);
      });
    }
    ptx::fence_async_shared();
    __syncwarp();
    const int row = first_row_of_warp() + lane_;
    if (lane_ >= kWarpRows || row >= rows_left_) return;
    ptx::bulk_store(place_.partial_row(params_, result_.run.partial, row), stage.rows[place_.half][row],
                    kHalfDims * sizeof(float));
    ptx::close_stores();
    ptx::wait_until_stores_are_done();
  }

  // The own split's state as the others' are.
  __device__ __forceinline__ void to_base_2() {
    RowState& state = result_.state;
    float left[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const RowLse lse = in_base_2(state.maximum[i], state.sum[i], params_.scale * kLog2E, left[i]);
      state.maximum[i] = lse.maximum;
      state.sum[i] = lse.total;
    }
    rescale_rows(result_.rO, left);
  }

  // One split, whose rows are on their way into the stage.
  __device__ __forceinline__ void add_split(int partial, uint64_t* full, uint32_t parity) {
    PartialStage& stage = smem_.partial_stage();
    RowState& state = result_.state;
    RowLse lse[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      // Rows that do not exist add something that is never stored.
      const int row = at_.row(i);
      lse[i] = row < rows_left_ ? params_.partial_lse[place_.row(params_, partial) + row]
                                : RowLse{-INFINITY, 0.0f};
    }
    ptx::mbarrier_wait(full, parity);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float top = fmaxf(state.maximum[i], lse[i].maximum);
      const float own = exp2_fast(state.maximum[i] - top);
      const float others = exp2_fast(lse[i].maximum - top) * lse[i].total;
      state.maximum[i] = top;
      state.sum[i] = state.sum[i] * own + others;
      const float* row = &stage.rows[place_.half][at_.row(i)][at_.in_quad * 2];
      visit_pairs(result_.rO, i, [&](int column, float& left, float& right) {
        const float2 v = *reinterpret_cast<const float2*>(row + column);
        left = left * own + v.x * others;
        right = right * own + v.y * others;
      });
    }
  }

  const DecodeParams& params_;
  SmemPlan& smem_;
  const CUtensorMap& out_map_;
  const OutputPlace place_;
  const FragmentPosition at_;
  const int lane_;
  const int rows_left_;
  RunResult& result_;
};

}  // namespace pallas_attn::mla::sm90
