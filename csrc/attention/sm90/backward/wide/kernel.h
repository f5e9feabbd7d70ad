// A pass: CTAs that stay, two math warpgroups each and one more that feeds them.
#pragma once

#include "attention/sm90/backward/wide/consumer.h"
#include "attention/sm90/backward/wide/loader.h"
#include "attention/sm90/backward/wide/row_loader.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90::backward::wide {

template <typename Element, typename Pass>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Pass>*>(shared_memory);
  if (threadIdx.x == 0) {
    smem.init();
    ptx::mbarrier_init_fence();
    for (const CUtensorMap* map : {&maps.query, &maps.d_out, &maps.key, &maps.value}) {
      ptx::tma_prefetch_descriptor(map);
    }
  }
  __syncthreads();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (role < kMath) {
    ptx::raise_registers<Pass::Dims::kConsumerRegisters>();
    // What comes of what came before is waited for by those who load.
    Consumer<Element, Pass>(params, smem, role, thread).work();
    return;
  }
  ptx::lower_registers<Pass::Dims::kFeederRegisters>();
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int lane = thread % 32;
  if (warp == kLoader) Loader<Pass>(params, maps, smem, lane).work();
  if (warp == kRowLoader) load_numbers<Element>(params, smem, lane);
}

}  // namespace pallas_attn::attention::sm90::backward::wide
