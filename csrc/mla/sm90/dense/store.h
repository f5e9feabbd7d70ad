// Where a run's result goes, and storing it from registers. The ways there are:
//
//                                        final, in the output's type     partial, float32
//   another run follows                  store_final                     store_partial, to stay in the L2
//   the part's last, CTAs wait for it    stage_final                     stage_partial
//   the part's last, a kernel follows    stage_final                     store_partial
//
// While another run follows, its query and pages are on their way into shared memory, so results can only
// leave from registers. Behind the last run there is room to stage them for the copy engine (last_run.h).
#pragma once

#include "common/math.h"
#include "mla/sm90/dense/config.h"
#include "mla/sm90/dense/run_walker.h"
#include "ptx/cache.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::mla::sm90 {

// What a thread of a math warpgroup holds of a run behind its last product: rows not divided by their sums
// yet.
struct RunResult {
  PageRun run;
  RowState state;  // sums complete
  float rO[kOutRegisters];
};

// Where a warpgroup's half of a row tile belongs.
struct OutputPlace {
  int kv_head;
  int row_tile;
  Half half;

  __device__ int first_row() const { return row_tile * kTileRows; }
  // Rows of the tile that there are.
  __device__ int rows_left(const DecodeParams& params) const { return params.rows() - first_row(); }
  // Of the output, or of the partial results.
  __device__ int64_t row(const DecodeParams& params, int request_or_partial) const {
    return (static_cast<int64_t>(request_or_partial) * params.num_kv_heads + kv_head) * params.rows() +
           first_row();
  }
  // This half's columns of one.
  __device__ float* partial_row(const DecodeParams& params, int partial, int row_in_tile) const {
    return params.partial_out + (row(params, partial) + row_in_tile) * kLatentDim + half * kHalfDims;
  }
};

// Stores of 16 bytes: a quad writes 64 of a row.
template <typename Element>
__device__ __forceinline__ void store_final(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                            const float (&factor)[kRowsPerThread], const DecodeParams& params,
                                            const OutputPlace& place, int request) {
  char* tile_out = static_cast<char*>(params.out) + place.row(params, request) * kLatentDim * 2;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    char* row_out = tile_out + static_cast<int64_t>(row) * kLatentDim * 2 + place.half * kHalfDims * 2;
#pragma unroll
    for (int group = 0; group < kHalfDims / 32; ++group) {
      const uint4 v = neighbours<Element>(rO, i, group, factor[i], at.in_quad);
      if (row < place.rows_left(params)) {
        *reinterpret_cast<uint4*>(row_out + group * 64 + at.in_quad * 16) = v;
      }
    }
  }
}

// Two columns of a quad's lanes make one 32-byte sector of float32 as they are. `store(float*, float2)` says
// how.
template <typename Store>
__device__ __forceinline__ void store_partial(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                              const float (&factor)[kRowsPerThread],
                                              const DecodeParams& params, const OutputPlace& place,
                                              int partial, Store store) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= place.rows_left(params)) continue;
    float* row_out = place.partial_row(params, partial, row) + at.in_quad * 2;
    visit_pairs(rO, i, [&](int column, float left, float right) {
      store(row_out + column, make_float2(left * factor[i], right * factor[i]));
    });
  }
}

// Of a final result or a partial one; by one lane for each row, of one warpgroup.
__device__ __forceinline__ void store_lse(const DecodeParams& params, const OutputPlace& place,
                                          const PageRun& run, const FragmentPosition& at,
                                          const RowLse (&lse)[kRowsPerThread]) {
  if (place.half != kLow || at.in_quad != 0) return;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= place.rows_left(params)) continue;
    if (run.partial < 0) {
      *params.lse_of(run.request, place.kv_head, place.first_row() + row) = log2_of(lse[i]) * kLn2;
    } else {
      params.partial_lse[place.row(params, run.partial) + row] = lse[i];
    }
  }
}

// How a run ends, of scores that `scale_log2` makes base 2. What is final makes room for the rows' sinks.
__device__ __forceinline__ RowEnds ends_of(const DecodeParams& params, const OutputPlace& place,
                                           const PageRun& run, const FragmentPosition& at,
                                           const RowState& state, float scale_log2) {
  RowEnds ends(state, scale_log2);
  if (params.sinks == nullptr || run.partial >= 0) return ends;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= place.rows_left(params)) continue;
    ends.factor[i] *= share_beside_sink(ends.lse[i], params.sinks[place.row(params, 0) + row]);
  }
  return ends;
}

// Where another run follows.
template <typename Element>
__device__ __forceinline__ void store_run(const DecodeParams& params, const OutputPlace& place,
                                          const PageRun& run, const FragmentPosition& at,
                                          const RowState& state, const float (&rO)[kOutRegisters]) {
  const RowEnds ends = ends_of(params, place, run, at, state, params.scale * kLog2E);
  if (run.partial < 0) {
    store_final<Element>(rO, at, ends.factor, params, place, run.request);
  } else {
    // Its reader comes at the end and discards it. Until then it should stay in the L2: in device memory the
    // few writes among all the reads of pages cost several times their bytes.
    const uint64_t policy = ptx::l2_evict_last_policy();
    store_partial(rO, at, ends.factor, params, place, run.partial,
                  [=](float* to, float2 v) { ptx::store_with_policy(to, v, policy); });
  }
  store_lse(params, place, run, at, ends.lse);
}

}  // namespace pallas_attn::mla::sm90
