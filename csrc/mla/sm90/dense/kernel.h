// The dense Hopper MLA decode kernel. The README beside params.h draws its schedule.
#pragma once

#include <cuda.h>

#include "mla/sm90/dense/pages.h"
#include "mla/sm90/dense/producer.h"
#include "mla/sm90/dense/roles.h"

namespace pallas_attn::mla::sm90 {

template <typename Element>
__global__ void __launch_bounds__(kThreads, 1)
    dense_decode_kernel(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap cache_map,
                        const __grid_constant__ CUtensorMap out_map, const Merging merging) {
  extern __shared__ __align__(1024) char shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem);
    ptx::tma_prefetch_descriptor(&query_map);
    ptx::tma_prefetch_descriptor(&cache_map);
    ptx::tma_prefetch_descriptor(&out_map);
  }
  run_decode_cta<Element, TablePages, PrefixMask>(params, smem, out_map, merging, [&](int warp) {
    const int row_tile = blockIdx.x, part = blockIdx.y, kv_head = blockIdx.z;
    if (warp == 0) {
      Producer<TablePages>(params, query_map, cache_map, smem, kv_head, row_tile, threadIdx.x % 32)
          .work_through(part);
    } else if (warp == 1 && merging == Merging::kInside) {
      tell_cuts(params, smem.cuts);
    }
  });
}

}  // namespace pallas_attn::mla::sm90
