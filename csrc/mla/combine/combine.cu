// out = sum_i 2^(lse_i - lse) out_i over the splits i of a request, lse = log2 sum_i 2^lse_i.
//
// No more requests are cut than there are parts. A batch larger than that is reached through the schedule: exactly the
// parts whose first request is in its second split mark a request that was cut, so the grid is never larger than
// rows x parts. Two shapes of block:
//   tall  a warp has a whole row: many cut requests of a few splits (large batches)
//   wide  eight warps share a quarter of a row, each an eighth of the splits: few requests, a hundred splits
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/math.h"
#include "mla/combine/combine.h"
#include "ptx/cluster.h"

namespace pallas_attn::mla {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kVector = 4;  // floats a load
constexpr int kWarpColumns = kWarp * kVector;

__device__ __forceinline__ float warp_max(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
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

__device__ __forceinline__ RowWeights weigh_splits(const float* lse2, int splits, int64_t stride, int lane) {
  float maximum = -INFINITY;
#pragma unroll 4
  for (int i = lane; i < splits; i += kWarp) maximum = fmaxf(maximum, lse2[i * stride]);
  maximum = warp_max(maximum);
  if (maximum == -INFINITY) maximum = 0.0f;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = lane; i < splits; i += kWarp) sum += exp2f(lse2[i * stride] - maximum);
  return {maximum, warp_sum(sum)};
}

// `kSharing`: how many warps share a row's splits.
template <typename Element, int kSharing>
__global__ void __launch_bounds__(kWarp* kWarps) combine_kernel(const __grid_constant__ DecodeParams params) {
  constexpr int kRows = kWarps / kSharing;
  constexpr int kChunks = kSharing == 1 ? kLatentDim / kWarpColumns : 1;  // vectors a lane has
  constexpr int kColumnBlocks = kLatentDim / (kWarpColumns * kChunks);
  constexpr int kBatch = kSharing == 1 ? 4 : 8;          // splits loaded at once

  // All of this was written before the decode kernel was queued, so it may be read before that one ends.
  int request = blockIdx.y;
  bool cut = true;
  if (params.batch > params.num_sm_parts) {
    const int* part = params.schedule + blockIdx.y * kScheduleFields;
    request = part[kBeginRequest];
    cut = part[kBeginSplit] == 1 && request < params.batch;
  }
  const int first_slot = cut ? params.num_splits[request] : 0;
  const int splits = cut ? params.num_splits[request + 1] - first_slot : 0;
  // Even a block without work waits, or the kernel after this one could start before the decode kernel has ended.
  ptx::wait_for_previous_kernel();
  if (splits <= 1) return;

  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int rows = params.rows();
  const int row = blockIdx.x / kColumnBlocks * kRows + warp / kSharing;
  const int first_column = blockIdx.x % kColumnBlocks * kWarpColumns + lane * kVector;
  if (kSharing == 1 && row >= rows) return;  // a shared row exists for every block

  const float* lse2 = params.partial_lse2 + static_cast<int64_t>(first_slot) * rows + row;
  const RowWeights weights = weigh_splits(lse2, splits, rows, lane);

  const float* partial = params.partial_out + (static_cast<int64_t>(first_slot) * rows + row) * kLatentDim + first_column;
  const int64_t split_stride = static_cast<int64_t>(rows) * kLatentDim;
  float4 sum[kChunks] = {};
  // Loads of several splits in flight at once: this kernel is all latency.
  for (int first = warp % kSharing; first < splits; first += kSharing * kBatch) {
    float weight[kBatch];
    float4 v[kBatch][kChunks];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = min(first + j * kSharing, splits - 1);
      weight[j] = lse2[i * rows];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        v[j][chunk] = *reinterpret_cast<const float4*>(partial + i * split_stride + chunk * kWarpColumns);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * kSharing >= splits) break;
      const float w = exp2f(weight[j] - weights.maximum);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        sum[chunk].x += w * v[j][chunk].x;
        sum[chunk].y += w * v[j][chunk].y;
        sum[chunk].z += w * v[j][chunk].z;
        sum[chunk].w += w * v[j][chunk].w;
      }
    }
  }

  if constexpr (kSharing > 1) {
    __shared__ float4 shared_sums[kWarps][kWarp];
    shared_sums[warp][lane] = sum[0];
    __syncthreads();
    if (warp != 0) return;
    for (int other = 1; other < kWarps; ++other) {
      const float4 v = shared_sums[other][lane];
      sum[0].x += v.x;
      sum[0].y += v.y;
      sum[0].z += v.z;
      sum[0].w += v.w;
    }
  }

  const float factor = weights.sum == 0.0f ? 0.0f : 1.0f / weights.sum;
  Element* out = static_cast<Element*>(params.out) + (static_cast<int64_t>(request) * rows + row) * kLatentDim + first_column;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float4 v = sum[chunk];
    store_vector(out + chunk * kWarpColumns, make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor));
  }
  if (lane == 0 && blockIdx.x % kColumnBlocks == 0) {
    const int token = row / params.num_heads;
    const int head = row % params.num_heads;
    const float lse = weights.sum == 0.0f ? -INFINITY : (weights.maximum + log2f(weights.sum)) * kLn2;
    params.lse[(static_cast<int64_t>(request) * params.num_heads + head) * params.query_len + token] = lse;
  }
}

template <typename Element, int kSharing>
LaunchStatus launch(const DecodeParams& params, cudaStream_t stream) {
  const int blocks = kSharing == 1 ? ceil_div(params.rows(), kWarps) : params.rows() * (kLatentDim / kWarpColumns);
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks, params.batch < params.num_sm_parts ? params.batch : params.num_sm_parts);
  config.blockDim = dim3(kWarp * kWarps);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return {cudaLaunchKernelEx(&config, combine_kernel<Element, kSharing>, params), "launching the combine kernel"};
}

template <typename Element>
LaunchStatus launch_for_batch(const DecodeParams& params, cudaStream_t stream) {
  // The host does not know the lengths; with this many parts a request, long rows of splits are what to expect.
  constexpr int kManyParts = 12;
  if (params.num_sm_parts >= kManyParts * params.batch) return launch<Element, kWarps>(params, stream);
  return launch<Element, 1>(params, stream);
}

}  // namespace

LaunchStatus launch_combine(const DecodeParams& params, cudaStream_t stream) {
  // A batch cannot be cut when there is one part, and no partial was written.
  if (params.num_sm_parts == 1) return {};
  return params.element == ElementType::kBfloat16 ? launch_for_batch<__nv_bfloat16>(params, stream)
                                                  : launch_for_batch<__half>(params, stream);
}

}  // namespace pallas_attn::mla
