// Greedy sharing of pages: every part takes the same budget of pages, a request costing its pages plus a
// fixed overhead, and a request that does not fit is cut where the budget ends.
//
// One warp: the cost is a walk over the batch and the parts, once for all layers of a decoding step.
#include "mla/schedule/schedule.h"

namespace pallas_attn::mla {
namespace {

constexpr int kWarp = 32;

__global__ void __launch_bounds__(kWarp) schedule_kernel(ScheduleParams params) {
  extern __shared__ int pages_of[];
  const int lane = threadIdx.x;
  const int overhead = params.overhead_pages;

  long long total = 0;
  for (int request = lane; request < params.batch; request += kWarp) {
    const int length = max(params.seq_lens[request], 0);
    const int pages = length / kPageTokens + (length % kPageTokens > 0);  // ceil_div would overflow
    pages_of[request] = pages;
    total += pages + overhead;
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    total += __shfl_xor_sync(0xffffffff, total, distance);
  }
  __syncwarp();
  if (lane != 0) return;

  const long long share = (total + params.num_sm_parts - 1) / params.num_sm_parts;
  // Never so small that a part could not start anything.
  const long long budget = max(share + overhead, 2LL * overhead);

  int request = 0, page = 0, split = 0, splits_before = 0;
  params.num_splits[0] = 0;
  for (int part = 0; part < params.num_sm_parts; ++part) {
    int* row = params.schedule + part * kScheduleFields;
    row[kBeginRequest] = request;
    row[kBeginToken] = page * kPageTokens;
    row[kBeginSplit] = split;

    long long left = budget;
    while (request < params.batch) {
      const int remaining = pages_of[request] - page;
      if (left < remaining + overhead) {
        if (left > overhead) {
          page += static_cast<int>(left - overhead);
          ++split;
        }
        break;
      }
      left -= remaining + overhead;
      splits_before += split + 1;
      params.num_splits[++request] = splits_before;
      page = 0;
      split = 0;
    }

    const bool cut = page > 0;
    row[kEndRequest] = cut ? request : request - 1;
    row[kEndToken] = cut ? page * kPageTokens : params.seq_lens[request - 1];
    for (int field = kBeginSplit + 1; field < kScheduleFields; ++field) row[field] = 0;
  }
}

}  // namespace

LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  const size_t shared_bytes = sizeof(int) * params.batch;
  constexpr size_t kDefaultLimit = 48 * 1024;
  if (shared_bytes > kDefaultLimit) {
    const cudaError_t error = cudaFuncSetAttribute(
        schedule_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return {error, "raising the schedule kernel's shared memory limit"};
  }
  schedule_kernel<<<1, kWarp, shared_bytes, stream>>>(params);
  return {cudaGetLastError(), "launching the schedule kernel"};
}

}  // namespace pallas_attn::mla
