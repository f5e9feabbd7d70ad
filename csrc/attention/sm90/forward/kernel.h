// Attention's forward pass on Hopper: CTAs that stay, math warpgroups each and one more that feeds them.
#pragma once

#include <type_traits>

#include "attention/sm90/forward/consumer.h"
#include "attention/sm90/forward/converter.h"
#include "attention/sm90/forward/gatherer.h"
#include "attention/sm90/forward/list_loader.h"
#include "attention/sm90/forward/loader.h"
#include "attention/sm90/forward/raw_loader.h"
#include "attention/sm90/forward/scout.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape, Role kRole>
using EngineOf = std::conditional_t<Shape::kListed, ListLoader<Shape, kRole>, Loader<Shape, kRole>>;

// Warps that are told of tiles beside those of math, and who fills a buffer of keys, or of values.
template <typename Shape>
__device__ __forceinline__ void init_barriers(SmemPlan<Shape>& smem) {
  int feeders = kLoaders, writers = 1;
  if constexpr (Shape::kFeed == Feed::kGathered) {
    feeders = 2 * kHandWarps, writers = Gatherer<Shape, Role::kKeys>::kWriters;
  } else if constexpr (Shape::kConverted) {
    feeders = 1 + 2 * kConverters, writers = kConverters;
    smem.raw.keys.ring.init(kConverters, 1, 1);
    smem.raw.values.ring.init(kConverters, 1, 1);
  }
  smem.told.init(Shape::kConsumerWarps + feeders, 1, 1);
  smem.queries.init(Shape::kConsumerWarps, 1, 1);
  smem.keys.init(Shape::kConsumerWarps, writers, writers);
  smem.values.init(Shape::kConsumerWarps, writers, writers);
  ptx::mbarrier_init_fence();
}

template <typename Element, typename Shape, Form kForm>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ Maps maps,
                   const __grid_constant__ Boxes boxes) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& smem = *reinterpret_cast<SmemPlan<Shape>*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem);
    ptx::tma_prefetch_descriptor(&maps.query);
    // Where threads copy there are none of these.
    if (boxes.rows > 0) {
      ptx::tma_prefetch_descriptor(&maps.key);
      ptx::tma_prefetch_descriptor(&maps.value);
    }
  }
  __syncthreads();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (role < Shape::kMath) {
    ptx::raise_registers<Shape::kConsumerRegisters>();
    Consumer<Element, Shape, kForm>(params, smem, role, thread).work();
    return;
  }
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int lane = thread % 32;
  if constexpr (Shape::kConverted) {
    // Both warpgroups run the same code: a converter is there once for keys and once for values, and a
    // sub-core has either.
    ptx::lower_registers<Shape::kFeederRegisters>();
    using Keys = Converter<Element, Shape, Role::kKeys>;
    using Values = Converter<Element, Shape, Role::kValues>;
    const int feeder = (role - Shape::kMath) * 4 + warp, converter = feeder - kFirstConverter;
    if (feeder == kScout) Scout<Shape>(params, maps, boxes, smem, lane).work();
    if (feeder == kRawLoader) load_tiles(smem, lane, RawLoader<Shape>(params, maps, boxes, smem, lane));
    if (converter >= 0 && converter % 2 == 0) {
      load_tiles(smem, lane, Keys(params, maps, boxes, smem, converter / 2, lane));
    }
    if (converter >= 0 && converter % 2 != 0) {
      load_tiles(smem, lane, Values(params, maps, boxes, smem, converter / 2, lane));
    }
  } else if (role == Shape::kMath) {
    ptx::lower_registers<Shape::kFeederRegisters>();
    if (warp == kScout) Scout<Shape>(params, maps, boxes, smem, lane).work();
    if constexpr (!Shape::kByHand) {
      using Keys = EngineOf<Shape, Role::kKeys>;
      using Values = EngineOf<Shape, Role::kValues>;
      if (warp == kKeyLoader) load_tiles(smem, lane, Keys(params, maps, boxes, smem, lane));
      if (warp == kValueLoader) load_tiles(smem, lane, Values(params, maps, boxes, smem, lane));
    }
  } else if constexpr (Shape::kByHand) {
    ptx::lower_registers<Shape::kHandRegisters>();
    using Keys = Gatherer<Shape, Role::kKeys>;
    using Values = Gatherer<Shape, Role::kValues>;
    const int of_role = warp % kHandWarps;
    if (warp < kHandWarps) load_tiles(smem, lane, Keys(params, smem, of_role, lane));
    if (warp >= kHandWarps) load_tiles(smem, lane, Values(params, smem, of_role, lane));
  }
}

}  // namespace pallas_attn::attention::sm90
