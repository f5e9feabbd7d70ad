// Attention's forward pass on Hopper: CTAs that stay, math warpgroups each and one more that feeds them.
#pragma once

#include "attention/sm90/forward/consumer.h"
#include "attention/sm90/forward/gatherer.h"
#include "attention/sm90/forward/loader.h"
#include "attention/sm90/forward/scout.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape>
__device__ __forceinline__ void init_barriers(SmemPlan<Shape>& smem, const Boxes& boxes) {
  const int writers = boxes.rows > 0 ? 1 : Gatherer<Shape, Role::kKeys, 1>::kWriters;
  smem.told.init(Shape::kConsumerWarps + kLoaders, 1, 1);
  smem.queries.init(Shape::kConsumerWarps, 1, 1);
  smem.keys.init(Shape::kConsumerWarps, writers, writers);
  smem.values.init(Shape::kConsumerWarps, writers, writers);
  ptx::mbarrier_init_fence();
}

template <typename Shape, Role kRole>
__device__ __forceinline__ void load(const ForwardParams& params, const Maps& maps, const Boxes& boxes,
                                     SmemPlan<Shape>& smem, int lane) {
  if (boxes.rows > 0) {
    Loader<Shape, kRole>(params, maps, boxes, smem, lane).work();
  } else {
    Gatherer<Shape, kRole, 1>(params, smem, 0, lane).work();
  }
}

template <typename Element, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ Maps maps,
                   const __grid_constant__ Boxes boxes) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem, boxes);
    ptx::tma_prefetch_descriptor(&maps.query);
    ptx::tma_prefetch_descriptor(&maps.key);
    ptx::tma_prefetch_descriptor(&maps.value);
  }
  __syncthreads();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (role < Shape::kMath) {
    ptx::raise_registers<Shape::kConsumerRegisters>();
    Consumer<Element, Shape>(params, boxes.rows == 0, smem, role, thread).work();
  } else {
    ptx::lower_registers<Shape::kFeederRegisters>();
    const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
    const int lane = thread % 32;
    if (warp == kScout) Scout<Shape>(params, maps, boxes, smem, lane).work();
    if (warp == kKeyLoader) load<Shape, Role::kKeys>(params, maps, boxes, smem, lane);
    if (warp == kValueLoader) load<Shape, Role::kValues>(params, maps, boxes, smem, lane);
  }
}

}  // namespace pallas_attn::attention::sm90
