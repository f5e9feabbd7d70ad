// What racecheck makes of correct synchronisation between warps with roles (make sanitize prints it beside
// the report on the MLA kernels). One warp writes shared memory and another reads it, ordered in four ways,
// the writer being the lower or the higher warp; two warps hand a value to and fro; a flag lies beside bulk
// copies; and once nothing is ordered, which must be reported. What is reported of a correct way here says
// nothing about a kernel that uses it.
#include <cuda_runtime.h>

#include <cstdio>

#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/shared.h"

namespace {

using namespace pallas_attn;

constexpr int kWarp = 32;
constexpr int kThreads = 3 * kWarp;  // the third warp only copies, or takes no part
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

// Two warps in turns, as the warpgroups of the decode kernel are: each publishes a row of values, announces
// it by arriving at a barrier of its own and then waits at the other's. A value travels to and fro and grows
// by one each time: between two rows, mirrored, or in place, each side overwriting what it has read.
template <bool kInPlace>
__global__ void to_and_fro(int* out) {
  constexpr int kRounds = 8;
  __shared__ int values[2][kWarp];
  const int side = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (side > 1) return;
  int& own = values[kInPlace ? 0 : side][lane];
  int& other = values[kInPlace ? 0 : 1 - side][kInPlace ? lane : kWarp - 1 - lane];
  int value = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (side == 0) {
      own = value;
      ptx::named_barrier_arrive(1, kPair);
      ptx::named_barrier_sync(2, kPair);
      value = other + 1;
    } else {
      ptx::named_barrier_sync(1, kPair);
      own = other + 1;
      ptx::named_barrier_arrive(2, kPair);
    }
  }
  // The caller expects what a hand-over gives.
  if (side == 0) out[lane] = value == 2 * kRounds ? kWarp - 1 - lane : -1;
}

// A flag that the thread which starts bulk copies leaves beside each, read behind the copy's barrier; the
// reading warp hands the buffer back by one lane's arrival.
__global__ void flag_beside_copies(const int* in, int* out) {
  constexpr int kCopies = 4;
  __shared__ alignas(16) int values[kWarp];
  __shared__ int flag;
  __shared__ uint64_t full, empty;
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&empty, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  bool right = true;
  for (int copy = 0; copy < kCopies; ++copy) {
    if (warp == 2 && lane == 0) {
      ptx::mbarrier_wait(&empty, (copy & 1) ^ 1);
      flag = copy;
      ptx::mbarrier_arrive_expect_bytes(&full, sizeof(values));
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              ptx::shared_address(values)),
          "l"(in), "n"(sizeof(values)), "r"(ptx::shared_address(&full))
          : "memory");
    }
    if (warp == 0) {
      ptx::mbarrier_wait(&full, copy & 1);
      right &= flag == copy && values[lane] == 0;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&empty);
    }
  }
  if (warp == 0) out[lane] = right ? kWarp - 1 - lane : -1;
}

bool report(const char* name, const int* out, bool ordered = true) {
  int first = -1;
  const cudaError_t error = cudaMemcpy(&first, out, sizeof(first), cudaMemcpyDeviceToHost);
  const bool right = error == cudaSuccess && (!ordered || first == kWarp - 1);
  std::printf("%s: %s\n", name, right ? "done" : cudaGetErrorString(error));
  return right;
}

template <Order kOrder, int kWriter>
bool run(const char* name, int* out) {
  hand_over<kOrder, kWriter><<<1, kThreads>>>(out);
  return report(name, out, kOrder != kNone);
}

}  // namespace

int main() {
  int* out = nullptr;
  if (cudaMalloc(&out, 2 * kWarp * sizeof(int)) != cudaSuccess) return 1;
  int* zeros = out + kWarp;
  if (cudaMemset(zeros, 0, kWarp * sizeof(int)) != cudaSuccess) return 1;
  bool all = run<kSyncThreads, 0>("__syncthreads, written by warp 0", out);
  all &= run<kSyncThreads, 1>("__syncthreads, written by warp 1", out);
  all &= run<kArriving, 0>("arrive, sync, written by warp 0", out);
  all &= run<kArriving, 1>("arrive, sync, written by warp 1", out);
  all &= run<kWaitingAtTwoPlaces, 0>("sync at two places, written by warp 0", out);
  all &= run<kWaitingAtTwoPlaces, 1>("sync at two places, written by warp 1", out);
  all &= run<kMbarrier, 0>("mbarrier, written by warp 0", out);
  all &= run<kMbarrier, 1>("mbarrier, written by warp 1", out);
  to_and_fro<false><<<1, kThreads>>>(out);
  all &= report("to and fro", out);
  to_and_fro<true><<<1, kThreads>>>(out);
  all &= report("to and fro in place", out);
  flag_beside_copies<<<1, kThreads>>>(zeros, out);
  all &= report("flag beside copies", out);
  all &= run<kNone, 0>("not ordered", out);
  return all ? 0 : 1;
}
