// What racecheck makes of correct synchronisation between warps with roles (make sanitize prints it beside
// the report on the MLA kernels): one warp writes shared memory, another reads it, ordered in four ways, the
// writer being the lower or the higher warp; and once not ordered at all, which must be reported. A way that
// is reported here says nothing about a kernel that uses it.
#include <cuda_runtime.h>

#include <cstdio>

#include "ptx/control.h"
#include "ptx/mbarrier.h"

namespace {

using namespace pallas_attn;

constexpr int kWarp = 32;
constexpr int kThreads = 3 * kWarp;  // the third warp takes no part
constexpr int kPair = 2 * kWarp;

enum Order { kSyncThreads, kArriving, kWaitingAtTwoPlaces, kMbarrier, kNone };

template <Order kOrder, int kWriter>
__global__ void hand_over(int* out) {
  __shared__ int values[kWarp];
  __shared__ uint64_t written;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&written, kWarp);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp == kWriter) {
    values[lane] = lane;
    if (kOrder == kArriving) ptx::named_barrier_arrive(1, kPair);
    if (kOrder == kWaitingAtTwoPlaces) ptx::named_barrier_sync_unaligned(1, kPair);
    if (kOrder == kMbarrier) ptx::mbarrier_arrive(&written);
  }
  if (kOrder == kSyncThreads) __syncthreads();
  if (warp == 1 - kWriter) {
    if (kOrder == kArriving) ptx::named_barrier_sync(1, kPair);
    if (kOrder == kWaitingAtTwoPlaces) ptx::named_barrier_sync_unaligned(1, kPair);
    if (kOrder == kMbarrier) ptx::mbarrier_wait(&written, 0);
    out[lane] = values[kWarp - 1 - lane];
  }
}

template <Order kOrder, int kWriter>
bool run(const char* name, int* out) {
  hand_over<kOrder, kWriter><<<1, kThreads>>>(out);
  int first = -1;
  const cudaError_t error = cudaMemcpy(&first, out, sizeof(first), cudaMemcpyDeviceToHost);
  const bool right = error == cudaSuccess && (kOrder == kNone || first == kWarp - 1);
  std::printf("%s, written by warp %d: %s\n", name, kWriter, right ? "done" : cudaGetErrorString(error));
  return right;
}

}  // namespace

int main() {
  int* out = nullptr;
  if (cudaMalloc(&out, kWarp * sizeof(int)) != cudaSuccess) return 1;
  const bool all = run<kSyncThreads, 0>("__syncthreads", out) & run<kSyncThreads, 1>("__syncthreads", out) &
                   run<kArriving, 0>("arrive, sync", out) & run<kArriving, 1>("arrive, sync", out) &
                   run<kWaitingAtTwoPlaces, 0>("sync at two places", out) &
                   run<kWaitingAtTwoPlaces, 1>("sync at two places", out) &
                   run<kMbarrier, 0>("mbarrier", out) & run<kMbarrier, 1>("mbarrier", out) &
                   run<kNone, 0>("not ordered", out);
  return all ? 0 : 1;
}
