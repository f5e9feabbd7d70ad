// Attention's backward pass on Hopper, in one: CTAs that stay, two math warpgroups each and one more that
// feeds them. Gradients of a tile's keys and values stay in registers; that of queries is added up in memory.
#pragma once

#include "attention/sm90/backward/adder.h"
#include "attention/sm90/backward/consumer.h"
#include "attention/sm90/backward/loader.h"
#include "attention/sm90/backward/row_loader.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Element, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    smem.init();
    ptx::mbarrier_init_fence();
    for (const CUtensorMap* map : {&maps.query, &maps.d_out, &maps.key, &maps.value}) {
      ptx::tma_prefetch_descriptor(map);
    }
  }
  auto* const ones = reinterpret_cast<uint32_t*>(smem.ones);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.ones) / 4); i += Shape::kThreads) {
    ones[i] = ElementTraits<Element>::pack(Shape::kOne, Shape::kOne);
  }
  ptx::fence_async_shared();
  __syncthreads();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  // Opaque, so that it is kept: the compiler asks for it over and over otherwise, and the answer takes a
  // while.
  const int thread = ptx::another(static_cast<int>(threadIdx.x % kWarpgroupThreads));
  if (role < Shape::kMath) {
    ptx::raise_registers<Shape::kConsumerRegisters>();
    // What comes of what came before is waited for by those who load.
    Consumer<Element, Shape>(params, smem, role, thread).work();
    return;
  }
  ptx::lower_registers<Shape::kFeederRegisters>();
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int lane = thread % 32;
  if (warp == kLoader) Loader<Shape>(params, maps, smem, lane).work();
  if (warp == kRowLoader) {
    load_rows<Shape::kQueries, BandSteps<Side::kKeys>>(params, smem, smem.outs, lane);
  }
  if (warp >= kAdder) Adder<Shape>(params, smem, warp - kAdder, lane).work();
}

}  // namespace pallas_attn::attention::sm90::backward
