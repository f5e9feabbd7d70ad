#include <cuda_runtime.h>

#include "common/dependent_launch.h"
#include "mla/combine/combine.h"
#include "mla/combine/cut_list.h"
#include "ptx/control.h"

namespace pallas_attn::mla {
namespace {

constexpr int kRowSlices = kLatentDim / kMergeColumns;
constexpr int kSyncThreadsBarrier = 0;

// A block for every row, or every slice of 128 columns of one, cut or not.
template <typename Element, int kVectors, int kBatch>
__global__ void __launch_bounds__(kMergeThreads, 2)
    combine_few_rows_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ MergeScratch<kLatentDim> scratch;
  // Written before the decode kernel was queued, so it may be read before that one ends.
  const CutRequest cut = cut_request(params, blockIdx.y);
  // Even a block without work waits, or the kernel after this one could start before the decode kernel has
  // ended.
  ptx::wait_for_previous_kernel();
  if (cut.splits <= 1) return;
  constexpr int kBlocksPerRow = kRowSlices / kVectors;
  const int first_column = blockIdx.x % kBlocksPerRow * (kVectors * kMergeColumns);
  merge_row_by_block<Element, kLatentDim, kVectors, kBatch>(merge_view(params), cut,
                                                            blockIdx.x / kBlocksPerRow, first_column, scratch,
                                                            0, threadIdx.x, kSyncThreadsBarrier);
}

// As many blocks as run at once.
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads, 1)
    combine_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ MergeScratch<kLatentDim> scratch;
  __shared__ CutList list;
  for (int first = 0; first < num_cut_candidates(params); first += CutList::kCapacity) {
    if (threadIdx.x < 32) list_cut_requests(params, list, first, 1, threadIdx.x);
    // The list above, too, was there before the decode kernel.
    if (first == 0) ptx::wait_for_previous_kernel();
    __syncthreads();
    merge_cuts<Element>(params, list, scratch, blockIdx.x, gridDim.x, threadIdx.x, kSyncThreadsBarrier);
    __syncthreads();
  }
}

template <typename Element>
LaunchStatus launch(const DecodeParams& params, int num_sms, cudaStream_t stream) {
  constexpr const char* kStep = "launching the combine kernel";
  if (few_rows_to_merge(params, num_sms)) {
    const int rows = params.all_rows();
    const bool by_slices = rows * params.batch * kRowSlices <= 2 * num_sms;
    const auto kernel =
        by_slices ? combine_few_rows_kernel<Element, 1, 17> : combine_few_rows_kernel<Element, kRowSlices, 5>;
    const dim3 grid(by_slices ? rows * kRowSlices : rows, params.batch);
    return launch_dependent(kernel, grid, kMergeThreads, 0, stream, Blocks::kIndependent, kStep, params);
  }
  return launch_dependent(combine_kernel<Element>, num_sms, kMergeThreads, 0, stream, Blocks::kIndependent,
                          kStep, params);
}

}  // namespace

LaunchStatus launch_combine(const DecodeParams& params, int num_sms, cudaStream_t stream) {
  return params.element == ElementType::kBfloat16 ? launch<__nv_bfloat16>(params, num_sms, stream)
                                                  : launch<__half>(params, num_sms, stream);
}

}  // namespace pallas_attn::mla
