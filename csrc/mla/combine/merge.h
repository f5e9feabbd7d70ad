// out = sum_i 2^(lse_i - lse) out_i over the splits i of a request, lse = log2 sum_i 2^lse_i: device code
// that a grid of blocks runs together when all partial results are in memory.
//
// The work is nothing but latency, so what matters is how many loads are in flight at once. Two ways:
//   few splits   every warp has rows to itself, the next row's loads under way while it adds up the last one;
//   many splits  the eight warps of a block take turns at the splits of one row (or a quarter of it) and add
//                up what they have in shared memory.
// Either way a sum has one order.
#pragma once

#include "common/math.h"
#include "mla/element_traits.h"
#include "mla/params.h"
#include "ptx/cache.h"
#include "ptx/control.h"

namespace pallas_attn::mla {

constexpr int kMergeWarps = 8;
constexpr int kMergeThreads = kMergeWarps * 32;
constexpr int kMergeQuarters = 4;  // of a row: a warp loads a quarter of 512 floats at once

// A request of several splits, whose partial results lie in neighbouring slots.
struct CutRequest {
  int request;
  int first_slot;
  int splits;
};

// Some of the requests that were cut.
struct CutList {
  static constexpr int kCapacity = 256;
  CutRequest cut[kCapacity];  // those of few splits from the front, those of many from the back
  int few, many;
  bool any;  // including those of so few splits that they are not listed
};

struct MergeScratch {
  // By parity of the unit of work, so that one barrier a unit is enough.
  float sums[2][kMergeWarps][kLatentDim];
  float maxima[2][kMergeWarps];
  float weights[2][kMergeWarps];
};

// Whatever the schedule says, the partial results read are ones there is room for.
__device__ inline CutRequest cut_request(const DecodeParams& params, int request) {
  const auto slot_of = [&](int i) { return min(max(params.num_splits[i], 0), params.num_slots()); };
  const int first_slot = slot_of(request);
  return {request, first_slot, slot_of(request + 1) - first_slot};
}

// No more requests are cut than there are parts.
__device__ inline int num_cut_candidates(const DecodeParams& params) {
  return min(params.batch, params.num_sm_parts);
}

// By one warp: candidates from `first` on, as many as the list holds, with more than `least` splits. A batch
// larger than the number of parts is reached through the schedule: exactly the parts whose first request is
// in its second split mark a request that was cut. The same list, in the same order, in every block.
__device__ inline void list_cut_requests(const DecodeParams& params, CutList& list, int first, int least,
                                         int lane) {
  constexpr int kFewSplits = 8;
  const int end = min(num_cut_candidates(params), first + CutList::kCapacity);
  int few = 0, many = 0;
  bool any = false;
  for (int base = first; base < end; base += 32) {
    const int i = base + lane;
    CutRequest found = {};
    if (i < end) {
      if (params.batch <= params.num_sm_parts) {
        found = cut_request(params, i);
      } else {
        const int* part = params.schedule + i * kScheduleFields;
        const int request = part[kBeginRequest];
        if (part[kBeginSplit] == 1 && request >= 0 && request < params.batch) {
          found = cut_request(params, request);
        }
      }
    }
    const bool is_many = found.splits > kFewSplits;
    const bool is_few = found.splits > least && !is_many;
    const unsigned few_lanes = __ballot_sync(0xffffffff, is_few);
    const unsigned many_lanes = __ballot_sync(0xffffffff, is_many);
    const unsigned lanes_below = (1u << lane) - 1;
    if (is_few) list.cut[few + __popc(few_lanes & lanes_below)] = found;
    if (is_many) list.cut[CutList::kCapacity - 1 - many - __popc(many_lanes & lanes_below)] = found;
    few += __popc(few_lanes);
    many += __popc(many_lanes);
    any |= __any_sync(0xffffffff, found.splits > 1);
  }
  if (lane == 0) {
    list.few = few;
    list.many = many;
    list.any = any;
  }
}

// Threads 0 to 255 of block `block` of `num_blocks`, meeting at the named barrier `kBarrier`.
template <typename Element, int kBarrier>
class Merger {
 public:
  // `list` is what run() works through.
  __device__ Merger(const DecodeParams& params, const CutList* list, MergeScratch& scratch, int block,
                    int num_blocks, int thread)
      : params_(params),
        list_(list),
        scratch_(scratch),
        block_(block),
        num_blocks_(num_blocks),
        thread_(thread),
        warp_(thread / 32),
        lane_(thread % 32) {}

  // All of the list.
  __device__ void run() {
    const bool by_warp = list_->many * params_.all_rows() >= kManyRows * num_blocks_;
    merge_by_warp(by_warp);
    if (!by_warp) merge_by_block();
  }

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(kBarrier, kMergeThreads); }

  // The block adds up `kVectors` quarters of one row.
  template <int kVectors, int kBatch>
  __device__ __forceinline__ void merge_together(const CutRequest& cut, int row, int first_column,
                                                 int parity) {
    constexpr int kColumns = kVectors * kWarpColumns;
    Sum<kVectors> sum;
    for (int first = warp_; first < cut.splits; first += kBatch * kMergeWarps) {
      Batch<kBatch, kVectors> batch;
      load(batch, cut, row, first_column + lane_ * kVector, first, kMergeWarps);
      add_batch(sum, batch);
    }
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      *reinterpret_cast<float4*>(&scratch_.sums[parity][warp_][c * kWarpColumns + lane_ * kVector]) =
          sum.v[c];
    }
    if (lane_ == 0) {
      scratch_.maxima[parity][warp_] = sum.maximum;
      scratch_.weights[parity][warp_] = sum.weight;
    }
    sync();
    const int column = thread_ * 2;
    if (column >= kColumns) return;
    float maximum = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < kMergeWarps; ++warp) maximum = fmaxf(maximum, scratch_.maxima[parity][warp]);
    float weight = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kMergeWarps; ++warp) {
      const float share = exp2_fast(scratch_.maxima[parity][warp] - finite_or_zero(maximum));
      const float2 v = *reinterpret_cast<const float2*>(&scratch_.sums[parity][warp][column]);
      weight += share * scratch_.weights[parity][warp];
      x += share * v.x;
      y += share * v.y;
    }
    const float factor = weight == 0.0f ? 0.0f : 1.0f / weight;
    *reinterpret_cast<uint32_t*>(out_of(cut.request, row) + first_column + column) =
        ElementTraits<Element>::pack(x * factor, y * factor);
    if (thread_ == 0 && first_column == 0) store_lse(cut.request, row, maximum, weight);
  }

 private:
  static constexpr int kVector = 4;  // floats a load
  static constexpr int kWarpColumns = 32 * kVector;
  // From this many a block on, a row of many splits is better left to one warp than the block to one row.
  static constexpr int kManyRows = 3;

  // What some of a row's splits add up to, relative to 2^maximum.
  template <int kVectors>
  struct Sum {
    float4 v[kVectors] = {};
    float weight = 0.0f;  // NaN if any split's is
    float maximum = -INFINITY;
  };

  // Several splits' vectors of one lane, loaded together.
  template <int kSplits, int kVectors>
  struct Batch {
    float lse2[kSplits];
    float4 v[kSplits][kVectors];
  };

  // Splits first, first + step, ...; what is past the end has weight zero.
  template <int kSplits, int kVectors>
  __device__ __forceinline__ void load(Batch<kSplits, kVectors>& batch, const CutRequest& cut, int row,
                                       int column, int first, int step) const {
    const int64_t rows = params_.all_rows();
    const int64_t row_at = cut.first_slot * rows + row;
    const float* lse2 = params_.partial_lse2 + row_at;
    const float* partial = params_.partial_out + row_at * kLatentDim + column;
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const int split = first + j * step;
      const bool real = split < cut.splits;
      batch.lse2[j] = real ? lse2[split * rows] : -INFINITY;
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        const auto* from =
            reinterpret_cast<const float4*>(partial + split * rows * kLatentDim + c * kWarpColumns);
        batch.v[j][c] = real ? *from : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }

  // This warp has added them up and nobody else reads them. Where whole blocks merge there are few sequences,
  // and it would not pay.
  __device__ __forceinline__ void discard(const CutRequest& cut, int row) const {
    constexpr int kLineFloats = ptx::kLineBytes / sizeof(float);
    constexpr int kLines = kLatentDim / kLineFloats;
    const int64_t rows = params_.all_rows();
    const float* partial = params_.partial_out + (cut.first_slot * rows + row) * kLatentDim;
    __syncwarp();
    for (int i = lane_; i < cut.splits * kLines; i += 32) {
      ptx::discard_line(partial + i / kLines * rows * kLatentDim + i % kLines * kLineFloats);
    }
  }

  // Where nothing is visible, every weight shall be 2^-inf = 0 and not 2^(inf - inf).
  static __device__ __forceinline__ float finite_or_zero(float maximum) {
    return maximum == -INFINITY ? 0.0f : maximum;
  }

  static __device__ __forceinline__ void add(float4& sum, float weight, const float4& v) {
    sum.x += weight * v.x;
    sum.y += weight * v.y;
    sum.z += weight * v.z;
    sum.w += weight * v.w;
  }

  template <int kSplits, int kVectors>
  __device__ __forceinline__ void add_batch(Sum<kVectors>& sum, const Batch<kSplits, kVectors>& batch) const {
    float maximum = sum.maximum;
#pragma unroll
    for (int j = 0; j < kSplits; ++j) maximum = fmaxf(maximum, batch.lse2[j]);
    const float base = finite_or_zero(maximum);
    const float factor = exp2_fast(finite_or_zero(sum.maximum) - base);
    sum.maximum = maximum;
    sum.weight *= factor;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      sum.v[c].x *= factor;
      sum.v[c].y *= factor;
      sum.v[c].z *= factor;
      sum.v[c].w *= factor;
    }
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const float weight = exp2_fast(batch.lse2[j] - base);
      sum.weight += weight;
#pragma unroll
      for (int c = 0; c < kVectors; ++c) add(sum.v[c], weight, batch.v[j][c]);
    }
  }

  __device__ __forceinline__ void store_lse(int request, int row, float maximum, float weight) const {
    const float lse = weight == 0.0f ? -INFINITY : (finite_or_zero(maximum) + log2f(weight)) * kLn2;
    *params_.lse_of(request, row / params_.rows(), row % params_.rows()) = lse;
  }

  __device__ __forceinline__ Element* out_of(int request, int row) const {
    const int64_t row_at = static_cast<int64_t>(request) * params_.all_rows() + row;
    return static_cast<Element*>(params_.out) + row_at * kLatentDim;
  }

  // Rows of the list of few splits, or of both.
  __device__ void merge_by_warp(bool both) {
    constexpr int kBatch = 3;
    const int rows = params_.all_rows();
    const int units = (list_->few + (both ? list_->many : 0)) * rows;
    const int step = kMergeWarps * num_blocks_;
    const auto cut_of = [&](int unit) {
      const int i = unit / rows;
      return list_->cut[i < list_->few ? i : CutList::kCapacity - 1 - (i - list_->few)];
    };
    int unit = warp_ * num_blocks_ + block_;
    Batch<kBatch, kMergeQuarters> next;
    if (unit < units) load(next, cut_of(unit), unit % rows, lane_ * kVector, 0, 1);
    while (unit < units) {
      const CutRequest cut = cut_of(unit);
      const int row = unit % rows;
      Batch<kBatch, kMergeQuarters> batch = next;
      unit += step;
      if (unit < units) load(next, cut_of(unit), unit % rows, lane_ * kVector, 0, 1);

      Sum<kMergeQuarters> sum;
      add_batch(sum, batch);
      for (int first = kBatch; first < cut.splits; first += kBatch) {
        load(batch, cut, row, lane_ * kVector, first, 1);
        add_batch(sum, batch);
      }
      const float factor = sum.weight == 0.0f ? 0.0f : 1.0f / sum.weight;
      Element* out = out_of(cut.request, row) + lane_ * kVector;
#pragma unroll
      for (int c = 0; c < kMergeQuarters; ++c) {
        const float4 v = sum.v[c];
        *reinterpret_cast<uint2*>(out + c * kWarpColumns) =
            make_uint2(ElementTraits<Element>::pack(v.x * factor, v.y * factor),
                       ElementTraits<Element>::pack(v.z * factor, v.w * factor));
      }
      if (lane_ == 0) store_lse(cut.request, row, sum.maximum, sum.weight);
      discard(cut, row);
    }
  }

  // Rows of the list of many splits.
  __device__ void merge_by_block() {
    const int rows = params_.all_rows();
    const int units = list_->many * rows;
    int parity = 0;
    for (int unit = block_; unit < units; unit += num_blocks_, parity ^= 1) {
      merge_together<kMergeQuarters, 5>(list_->cut[CutList::kCapacity - 1 - unit / rows], unit % rows, 0,
                                        parity);
    }
  }

  const DecodeParams& params_;
  const CutList* list_;
  MergeScratch& scratch_;
  const int block_, num_blocks_, thread_, warp_, lane_;
};

}  // namespace pallas_attn::mla
