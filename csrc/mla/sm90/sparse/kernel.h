// The sparse Hopper MLA kernels: the dense one's math warpgroups, fed with rows gathered by `Feeder`.
#pragma once

#include <cuda.h>

#include "mla/sm90/dense/roles.h"
#include "mla/sm90/sparse/chosen.h"

namespace pallas_attn::mla::sm90 {

template <typename Element, typename Feeder>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_kernel(const __grid_constant__ SparseParams params, const __grid_constant__ CUtensorMap query_map,
                  const __grid_constant__ CUtensorMap out_map, const Merging merging) {
  extern __shared__ __align__(1024) char shared_memory[];
  SparsePlan& smem = *reinterpret_cast<SparsePlan*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem, Feeder::Ids::kCtas, Feeder::kWriters, Feeder::kRopeWriters);
    ptx::tma_prefetch_descriptor(&query_map);
    ptx::tma_prefetch_descriptor(&out_map);
  }
  run_decode_cta<Element, typename Feeder::Ids, HeldTokens>(params, smem, out_map, merging, [&](int warp) {
    Feeder(params, query_map, smem, warp).work_through(blockIdx.y);
    if constexpr (Feeder::Ids::Budget::kMerges) {
      if (warp == kWarpgroupWarps - 1 && merging == Merging::kInside) tell_cuts(params, smem.cuts);
    }
  });
}

}  // namespace pallas_attn::mla::sm90
