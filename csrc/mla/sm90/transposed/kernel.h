// The Hopper MLA decode kernels over tokens of 656 bytes. The README beside params.h says why its products
// are transposed.
#pragma once

#include "mla/sm90/dense/roles.h"
#include "mla/sm90/transposed/consumer.h"

namespace pallas_attn::mla::sm90::transposed {

template <typename Plan>
__device__ __forceinline__ void init_barriers(Plan& smem, int writers) {
  smem.page_ring.init(kOwners * kWarpgroupWarps, writers, writers);
  ptx::mbarrier_init_fence();
}

// `Tokens`: all of a request's, or chosen ones.
template <typename Tokens, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    transposed_decode_kernel(const __grid_constant__ typename Tokens::Params params, const Merging merging) {
  using Plan = typename Tokens::template Plan<kRows>;
  using Feeder = typename Tokens::template Feeder<Plan>;
  extern __shared__ __align__(1024) char shared_memory[];
  Plan& smem = *reinterpret_cast<Plan*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem, Feeder::kWriters);
    // Until there is one, if there ever is.
    for (PageRun& run : smem.run) {
      run = {};
      run.request = -1;
    }
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  const int part = blockIdx.y;
  // Through a shuffle, so that the compiler knows it to be uniform in a warp.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  if (role == kOwners) {
    ptx::lower_registers<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x % kWarpgroupThreads / 32, 0);
    if (warp < Feeder::kWarps) Feeder(params, smem, warp).work_through(part);
    // Asked again: kept, it would take a register that the feeder needs.
    if (threadIdx.x / 32 == kThreads / 32 - 1 && merging == Merging::kInside) tell_cuts(params, smem.cuts);
    return;
  }
  ptx::raise_registers<kMathRegisters>();
  const Place at(role, threadIdx.x % kWarpgroupThreads);
  RunResult<Tokens, Plan> result(params, smem, at);
  Consumer<Tokens, Plan>(params, smem, result, at).work_through(part);
  finish<__nv_bfloat16, true>(params, smem, result, result.run, merging);
  // As in dense/roles.h.
  if (merging == Merging::kKernelFollows) ptx::allow_dependent_launch();
}

}  // namespace pallas_attn::mla::sm90::transposed
