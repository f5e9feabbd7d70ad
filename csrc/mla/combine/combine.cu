// out = sum_i 2^(lse_i - lse) out_i over the splits i of a request, lse = log2 sum_i 2^lse_i.
//
// No more requests are cut than there are parts. A batch larger than that is reached through the schedule:
// exactly the parts whose first request is in its second split mark a request that was cut, so the grid is
// never larger than rows x parts. The work is nothing but latency, so what matters is how many loads are in
// flight at once. Three shapes of block:
//   tall    a warp has rows to itself, one after the other: few splits each, many rows
//   square  four warps have a row, two or four such teams take turns at its splits
//   wide    a warp has a quarter of a row, eight or sixteen take turns at its splits: few rows, many splits
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "common/dependent_launch.h"
#include "common/math.h"
#include "mla/combine/combine.h"
#include "ptx/control.h"

namespace pallas_attn::mla {
namespace {

constexpr int kWarp = 32;
constexpr int kVector = 4;  // floats a load
constexpr int kWarpColumns = kWarp * kVector;

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

__device__ __forceinline__ void store_vector(__nv_bfloat16* out, float4 v) {
  __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(pairs);
}

__device__ __forceinline__ void store_vector(__half* out, float4 v) {
  __half2 pairs[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(pairs);
}

// What a row's splits add up to.
struct RowWeights {
  float maximum;  // 0 where nothing was visible to any split, so that every weight is 2^-inf = 0
  float sum;      // NaN if any split's is
};

__device__ __forceinline__ float finite_or_zero(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

__device__ __forceinline__ RowWeights weigh_splits(const float* lse2, int splits, int64_t stride, int lane) {
  constexpr int kAtOnce = 4;
  float maximum = -INFINITY, sum = 0.0f;
  for (int first = lane; first < splits; first += kAtOnce * kWarp) {
    float x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * kWarp;
      x[j] = i < splits ? lse2[i * stride] : -INFINITY;
    }
    float top = maximum;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) top = fmaxf(top, x[j]);
    sum *= exp2_fast(finite_or_zero(maximum) - finite_or_zero(top));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) sum += exp2_fast(x[j] - finite_or_zero(top));
    maximum = top;
  }
  const float overall = finite_or_zero(warp_max(maximum));
  return {overall, warp_sum(sum * exp2_fast(finite_or_zero(maximum) - overall))};
}

// Several splits' vectors of one lane, loaded together.
template <int kSplits, int kVectors>
struct SplitBatch {
  float lse2[kSplits];
  float4 v[kSplits][kVectors];

  // Splits first, first + step, ...; those past the end repeat the last one with weight zero.
  __device__ __forceinline__ void load(const float* row_lse2, const float* partial, int first, int step,
                                       int splits, int64_t rows) {
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const int i = first + j * step;
      const int64_t within = min(i, splits - 1);
      const float x = row_lse2[within * rows];
      lse2[j] = i < splits ? x : -INFINITY;
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        v[j][c] = *reinterpret_cast<const float4*>(partial + within * rows * kLatentDim + c * kWarpColumns);
      }
    }
  }

  __device__ __forceinline__ void add_to(float4 (&sum)[kVectors], float maximum) const {
#pragma unroll
    for (int j = 0; j < kSplits; ++j) {
      const float weight = exp2_fast(lse2[j] - maximum);
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        sum[c].x += weight * v[j][c].x;
        sum[c].y += weight * v[j][c].y;
        sum[c].z += weight * v[j][c].z;
        sum[c].w += weight * v[j][c].w;
      }
    }
  }
};

// Of a block's warps, `kSharing` take turns at a row's splits and `kAcross` lie side by side on its columns.
template <int kWarps_, int kSharing_, int kAcross_, int kBatch_, int kRounds_ = 1>
struct BlockShape {
  static constexpr int kWarps = kWarps_, kSharing = kSharing_, kAcross = kAcross_;
  static constexpr int kBatch = kBatch_;  // splits a warp loads at once
  static constexpr int kRows = kWarps / (kSharing * kAcross);
  static constexpr bool kWholeRow = kRows > 1;
  static constexpr int kVectors = kWholeRow ? kLatentDim / kWarpColumns : 1;  // a lane's
  static constexpr int kColumnBlocks = kLatentDim / (kWarpColumns * kVectors * kAcross);
  static constexpr int kRounds = kRounds_;  // rows a warp merges one after the other
  // Left alone, ptxas spends as few registers as full occupancy asks for and loads one split after another.
  static constexpr int kBlocksPerSm = kWarps == 8 ? 3 : 1;
};
// Where requests are cut into few splits, most are not cut at all: fewer blocks find that out sooner.
using MostlyIdle = BlockShape<8, 1, 1, 2, 4>;
using Tall = BlockShape<8, 1, 1, 2>;
using Square = BlockShape<8, 2, 4, 8>;
using DeepSquare = BlockShape<16, 4, 4, 9>;
using Wide = BlockShape<8, 8, 1, 8>;
using DeepWide = BlockShape<16, 16, 1, 9>;

template <typename Element, typename Shape>
__device__ __forceinline__ void merge_row(const DecodeParams& params, int request, int first_slot, int splits,
                                          int row, int column_block) {
  constexpr int kSharing = Shape::kSharing, kAcross = Shape::kAcross, kVectors = Shape::kVectors;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int turn = warp / kAcross % kSharing;
  const int column = (column_block * kAcross + warp % kAcross) * kWarpColumns + lane * kVector;
  // Those of all KV heads: how they are grouped matters to the log-sum-exp alone.
  const int rows = params.all_rows();

  const float* lse2 = params.partial_lse2 + static_cast<int64_t>(first_slot) * rows + row;
  const float* partial =
      params.partial_out + (static_cast<int64_t>(first_slot) * rows + row) * kLatentDim + column;
  SplitBatch<Shape::kBatch, kVectors> batch;
  batch.load(lse2, partial, turn, kSharing, splits, rows);
  const RowWeights weights = weigh_splits(lse2, splits, rows, lane);

  float4 sum[kVectors] = {};
  for (int first = turn; first < splits;) {
    batch.add_to(sum, weights.maximum);
    first += kSharing * Shape::kBatch;
    if (first < splits) batch.load(lse2, partial, first, kSharing, splits, rows);
  }

  if constexpr (kSharing > 1) {
    __shared__ float4 shared_sums[kSharing][kAcross][kWarp];
    shared_sums[turn][warp % kAcross][lane] = sum[0];
    __syncthreads();
    if (turn != 0) return;
#pragma unroll
    for (int other = 1; other < kSharing; ++other) {
      const float4 v = shared_sums[other][warp % kAcross][lane];
      sum[0].x += v.x;
      sum[0].y += v.y;
      sum[0].z += v.z;
      sum[0].w += v.w;
    }
  }

  const float factor = weights.sum == 0.0f ? 0.0f : 1.0f / weights.sum;
  Element* out =
      static_cast<Element*>(params.out) + (static_cast<int64_t>(request) * rows + row) * kLatentDim + column;
#pragma unroll
  for (int c = 0; c < kVectors; ++c) {
    const float4 v = sum[c];
    store_vector(out + c * kWarpColumns, make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor));
  }
  if (column == 0) {
    const float lse = weights.sum == 0.0f ? -INFINITY : (weights.maximum + log2f(weights.sum)) * kLn2;
    *params.lse_of(request, row / params.rows(), row % params.rows()) = lse;
  }
}

template <typename Element, typename Shape>
__global__ void __launch_bounds__(kWarp* Shape::kWarps, Shape::kBlocksPerSm)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  // All of this was written before the decode kernel was queued, so it may be read before that one ends.
  int request = blockIdx.y;
  bool cut = true;
  if (params.batch > params.num_sm_parts) {
    const int* part = params.schedule + blockIdx.y * kScheduleFields;
    request = part[kBeginRequest];
    cut = part[kBeginSplit] == 1 && request >= 0 && request < params.batch;
  }
  // Whatever the schedule says, the partial results read are ones there is room for.
  const auto slot_of = [&](int i) { return min(max(params.num_splits[i], 0), params.num_slots()); };
  const int first_slot = cut ? slot_of(request) : 0;
  const int splits = cut ? slot_of(request + 1) - first_slot : 0;
  // Even a block without work waits, or the kernel after this one could start before the decode kernel has
  // ended.
  ptx::wait_for_previous_kernel();
  if (splits <= 1) return;

  const int warp_row = threadIdx.x / (kWarp * Shape::kSharing * Shape::kAcross);
  const int first_row = blockIdx.x / Shape::kColumnBlocks * (Shape::kRows * Shape::kRounds) + warp_row;
#pragma unroll 1
  for (int round = 0; round < Shape::kRounds; ++round) {
    const int row = first_row + round * Shape::kRows;
    if (row >= params.all_rows()) return;
    merge_row<Element, Shape>(params, request, first_slot, splits, row, blockIdx.x % Shape::kColumnBlocks);
  }
}

template <typename Element, typename Shape>
LaunchStatus launch(const DecodeParams& params, cudaStream_t stream) {
  const int row_blocks = ceil_div(params.all_rows(), Shape::kRows * Shape::kRounds);
  const dim3 grid(row_blocks * Shape::kColumnBlocks, std::min(params.batch, params.num_sm_parts));
  return launch_dependent(combine_kernel<Element, Shape>, grid, kWarp * Shape::kWarps, 0, stream,
                          "launching the combine kernel", params);
}

template <typename Element>
LaunchStatus launch_for_shape(const DecodeParams& params, cudaStream_t stream) {
  // The host does not know the lengths; this is what equal ones that fill the block table would give.
  const int64_t pages = static_cast<int64_t>(params.max_blocks) * params.batch;
  const int64_t splits = std::min<int64_t>(params.num_sm_parts, pages) / params.batch + 1;
  const int rows = params.all_rows() * std::min(params.batch, params.num_sm_parts);
  constexpr int kFewSplits = 4;
  constexpr int kManyRows = 1024;  // eight a multiprocessor: enough warps without sharing rows
  constexpr int kFewRows = 96;
  if (splits <= kFewSplits) return launch<Element, MostlyIdle>(params, stream);
  if (rows >= kManyRows) return launch<Element, Tall>(params, stream);
  if (rows <= kFewRows) {
    return splits > 64 ? launch<Element, DeepWide>(params, stream) : launch<Element, Wide>(params, stream);
  }
  return splits > 32 ? launch<Element, DeepSquare>(params, stream) : launch<Element, Square>(params, stream);
}

}  // namespace

LaunchStatus launch_combine(const DecodeParams& params, cudaStream_t stream) {
  // A batch cannot be cut when there is one part, and no partial was written.
  if (params.num_sm_parts == 1) return {};
  return params.element == ElementType::kBfloat16 ? launch_for_shape<__nv_bfloat16>(params, stream)
                                                  : launch_for_shape<__half>(params, stream);
}

}  // namespace pallas_attn::mla
