// out = sum_i w_i out_i / sum_i w_i over the splits i of a request, w_i = 2^maximum_i total_i: device code
// for when all partial results are in memory.
//
// The work is nothing but latency, so what matters is how many loads are in flight at once. Two ways:
//   few splits   every warp has rows to itself, the next row's loads under way while it adds up the last one;
//   many splits  the eight warps of a block take turns at the splits of one row (or some columns of it) and
//                add up what they have in shared memory.
// Either way a sum has one order.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/element_traits.h"
#include "common/math.h"
#include "ptx/cache.h"
#include "ptx/control.h"
#include "sm90/online_softmax.h"

namespace pallas_attn {
inline namespace sm90 {

constexpr int kMergeWarps = 8;
constexpr int kMergeThreads = kMergeWarps * 32;
constexpr int kMergeVector = 4;                   // floats a load
constexpr int kMergeColumns = 32 * kMergeVector;  // that a warp loads at once

// The arrays that a merge reads and writes. A request's rows lie together, in the order [KV head, token, head
// of its group]; those of `lse` in the order [token, KV head, head of its group].
struct MergeView {
  const float* partial_out;   // [partials, rows, dim]
  const RowLse* partial_lse;  // [partials, rows]
  const float* sinks;         // [rows], or null
  void* out;                  // [requests, rows, dim]
  float* lse;                 // [requests, rows], natural logarithm
  int rows;                   // of a request
  int num_kv_heads;
  int group;

  __device__ __forceinline__ float* lse_of(int request, int row) const {
    const int rows_of_head = rows / num_kv_heads;
    const int kv_head = row / rows_of_head, within = row % rows_of_head;
    const int token = within / group;
    return lse + static_cast<int64_t>(request) * rows + (token * num_kv_heads + kv_head) * group +
           within % group;
  }
};

// A request of several splits, whose partial results are neighbours.
struct CutRequest {
  int request;
  int first_partial;
  int splits;
};

template <int kDim>
struct MergeScratch {
  // By parity of the unit of work, so that one barrier a unit is enough.
  float sums[2][kMergeWarps][kDim];
  float maxima[2][kMergeWarps];
  float weights[2][kMergeWarps];
};

// Where nothing is visible, every weight shall be 2^-inf = 0 and not 2^(inf - inf).
__device__ __forceinline__ float finite_or_zero(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// The vectors of several splits of a row that one lane adds up, loaded together.
template <int kSplits, int kVectors>
struct SplitBatch {
  RowLse lse[kSplits];
  float4 v[kSplits][kVectors];

  // Splits first, first + step, ...; what is past the end has weight zero.
  template <int kDim>
  __device__ __forceinline__ void load(const MergeView& view, const CutRequest& cut, int row, int column,
                                       int first, int step) {
    const int64_t rows = view.rows;
    const int64_t row_at = cut.first_partial * rows + row;
    const RowLse* from_lse = view.partial_lse + row_at;
    const float* from = view.partial_out + row_at * kDim + column;
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const int split = first + j * step;
      const bool real = split < cut.splits;
      lse[j] = real ? from_lse[split * rows] : RowLse{-INFINITY, 0.0f};
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        const auto* vector = reinterpret_cast<const float4*>(from + split * rows * kDim + c * kMergeColumns);
        v[j][c] = real ? *vector : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
};

// What some of a row's splits add up to, relative to 2^maximum.
template <int kVectors>
struct SplitSum {
  float4 v[kVectors] = {};
  float weight = 0.0f;  // NaN if any split's is
  float maximum = -INFINITY;

  template <int kSplits>
  __device__ __forceinline__ void add(const SplitBatch<kSplits, kVectors>& batch) {
    float top = maximum;
#pragma unroll
    for (int j = 0; j < kSplits; ++j) top = fmaxf(top, batch.lse[j].maximum);
    const float base = finite_or_zero(top);
    const float rescale = exp2_fast(maximum - base);
    maximum = top;
    weight *= rescale;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      v[c].x *= rescale;
      v[c].y *= rescale;
      v[c].z *= rescale;
      v[c].w *= rescale;
    }
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const float share = exp2_fast(batch.lse[j].maximum - base) * batch.lse[j].total;
      weight += share;
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        v[c].x += share * batch.v[j][c].x;
        v[c].y += share * batch.v[j][c].y;
        v[c].z += share * batch.v[j][c].z;
        v[c].w += share * batch.v[j][c].w;
      }
    }
  }
};

__device__ __forceinline__ float merged_factor(const MergeView& view, int row, float maximum, float weight) {
  const float factor = weight == 0.0f ? 0.0f : 1.0f / weight;
  if (view.sinks == nullptr) return factor;
  return factor * share_beside_sink({maximum, weight}, view.sinks[row]);
}

template <typename Element, int kDim>
__device__ __forceinline__ Element* merged_row(const MergeView& view, int request, int row) {
  return static_cast<Element*>(view.out) + (static_cast<int64_t>(request) * view.rows + row) * kDim;
}

// By eight warps that meet at a named barrier: `kVectors` x 128 columns of one row. A warp loads `kBatch`
// splits at once.
template <typename Element, int kDim, int kVectors, int kBatch>
__device__ __forceinline__ void merge_row_by_block(const MergeView& view, const CutRequest& cut, int row,
                                                   int first_column, MergeScratch<kDim>& scratch, int parity,
                                                   int thread, int barrier) {
  const int warp = thread / 32, lane = thread % 32;
  float (&sums)[kMergeWarps][kDim] = scratch.sums[parity];
  float (&maxima)[kMergeWarps] = scratch.maxima[parity];
  float (&weights)[kMergeWarps] = scratch.weights[parity];

  SplitSum<kVectors> sum;
  for (int first = warp; first < cut.splits; first += kBatch * kMergeWarps) {
    SplitBatch<kBatch, kVectors> batch;
    batch.template load<kDim>(view, cut, row, first_column + lane * kMergeVector, first, kMergeWarps);
    sum.add(batch);
  }
#pragma unroll
  for (int c = 0; c < kVectors; ++c) {
    *reinterpret_cast<float4*>(&sums[warp][c * kMergeColumns + lane * kMergeVector]) = sum.v[c];
  }
  if (lane == 0) {
    maxima[warp] = sum.maximum;
    weights[warp] = sum.weight;
  }
  ptx::named_barrier_sync(barrier, kMergeThreads);

  const int column = thread * 2;
  if (column >= kVectors * kMergeColumns) return;
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) maximum = fmaxf(maximum, maxima[i]);
  float weight = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) {
    const float share = exp2_fast(maxima[i] - finite_or_zero(maximum));
    const float2 v = *reinterpret_cast<const float2*>(&sums[i][column]);
    weight += share * weights[i];
    x += share * v.x;
    y += share * v.y;
  }
  const float factor = merged_factor(view, row, maximum, weight);
  *reinterpret_cast<uint32_t*>(merged_row<Element, kDim>(view, cut.request, row) + first_column + column) =
      ElementTraits<Element>::pack(x * factor, y * factor);
  if (thread == 0 && first_column == 0) *view.lse_of(cut.request, row) = log2_of({maximum, weight}) * kLn2;
}

// This warp has added a row's splits up and nobody else reads them. Where whole blocks merge there are few
// requests, and it would not pay.
template <int kDim>
__device__ __forceinline__ void discard_splits(const MergeView& view, const CutRequest& cut, int row,
                                               int lane) {
  constexpr int kLineFloats = ptx::kLineBytes / sizeof(float);
  constexpr int kLines = kDim / kLineFloats;
  const int64_t rows = view.rows;
  const float* partial = view.partial_out + (cut.first_partial * rows + row) * kDim;
  __syncwarp();
  for (int i = lane; i < cut.splits * kLines; i += 32) {
    ptx::discard_line(partial + i / kLines * rows * kDim + i % kLines * kLineFloats);
  }
}

// By one warp: every `step`-th of `units` rows from `unit` on; row `unit % view.rows` of the request
// `cut_of(unit / view.rows)`.
template <typename Element, int kDim, typename CutOf>
__device__ __forceinline__ void merge_rows_by_warp(const MergeView& view, int unit, int units, int step,
                                                   int lane, CutOf cut_of) {
  constexpr int kVectors = kDim / kMergeColumns;
  constexpr int kBatch = 3;
  const int rows = view.rows;
  SplitBatch<kBatch, kVectors> next;
  if (unit < units) {
    next.template load<kDim>(view, cut_of(unit / rows), unit % rows, lane * kMergeVector, 0, 1);
  }
  while (unit < units) {
    const CutRequest cut = cut_of(unit / rows);
    const int row = unit % rows;
    SplitBatch<kBatch, kVectors> batch = next;
    unit += step;
    if (unit < units) {
      next.template load<kDim>(view, cut_of(unit / rows), unit % rows, lane * kMergeVector, 0, 1);
    }

    SplitSum<kVectors> sum;
    sum.add(batch);
    for (int first = kBatch; first < cut.splits; first += kBatch) {
      batch.template load<kDim>(view, cut, row, lane * kMergeVector, first, 1);
      sum.add(batch);
    }
    const float factor = merged_factor(view, row, sum.maximum, sum.weight);
    Element* out = merged_row<Element, kDim>(view, cut.request, row) + lane * kMergeVector;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      const float4 v = sum.v[c];
      *reinterpret_cast<uint2*>(out + c * kMergeColumns) =
          make_uint2(ElementTraits<Element>::pack(v.x * factor, v.y * factor),
                     ElementTraits<Element>::pack(v.z * factor, v.w * factor));
    }
    if (lane == 0) *view.lse_of(cut.request, row) = log2_of({sum.maximum, sum.weight}) * kLn2;
    discard_splits<kDim>(view, cut, row, lane);
  }
}

}  // namespace sm90
}  // namespace pallas_attn
