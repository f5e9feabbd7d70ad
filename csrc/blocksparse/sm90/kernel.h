// Block-sparse prefill on Hopper: CTAs that stay, two math warpgroups each and a third one that feeds them.
#pragma once

#include "blocksparse/sm90/consumer.h"
#include "blocksparse/sm90/loader.h"
#include "blocksparse/sm90/scout.h"
#include "ptx/control.h"

namespace pallas_attn::blocksparse::sm90 {

__device__ __forceinline__ void init_barriers(SmemPlan& smem) {
  smem.told.init(kConsumerWarps + kLoaders, 1, 1);
  smem.keys.init(kConsumerWarps, 1, 1);
  smem.values.init(kConsumerWarps, 1, 1);
  for (uint64_t& full : smem.query_full) ptx::mbarrier_init(&full, 1);
  ptx::mbarrier_init_fence();
}

template <typename Element>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem);
    ptx::tma_prefetch_descriptor(&maps.query);
    ptx::tma_prefetch_descriptor(&maps.key);
    ptx::tma_prefetch_descriptor(&maps.value);
  }
  __syncthreads();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (role < kHalves) {
    ptx::raise_registers<kConsumerRegisters>();
    Consumer<Element>(params, smem, role, thread).work();
  } else {
    ptx::lower_registers<kFeederRegisters>();
    const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const int lane = thread % 32;
    if (warp == kScout) Scout(params, maps, smem, lane).work();
    if (warp == kKeyLoader) Loader<kKeyStages>(params, smem, maps.key, smem.sK, smem.keys, lane).work();
    if (warp == kValueLoader)
      Loader<kValueStages>(params, smem, maps.value, smem.sV, smem.values, lane).work();
  }
}

}  // namespace pallas_attn::blocksparse::sm90
