// The same kernel over a cache in 656 bytes a token: what feeds the math warpgroups is another.
#pragma once

#include <cuda.h>

#include "mla/sm90/dense/dequantizer.h"
#include "mla/sm90/dense/roles.h"

namespace pallas_attn::mla::sm90 {

__global__ void __launch_bounds__(kThreads, 1)
    quantized_decode_kernel(const __grid_constant__ DecodeParams params,
                            const __grid_constant__ CUtensorMap query_map,
                            const __grid_constant__ CUtensorMap rope_map,
                            const __grid_constant__ CUtensorMap out_map, const Merging merging) {
  extern __shared__ __align__(1024) char shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  if (threadIdx.x == 0) {
    init_barriers(smem, 1, kFeederWarps);
    ptx::tma_prefetch_descriptor(&query_map);
    ptx::tma_prefetch_descriptor(&rope_map);
    ptx::tma_prefetch_descriptor(&out_map);
  }
  run_decode_cta<__nv_bfloat16, QuantizedPages, PrefixMask>(params, smem, out_map, merging, [&](int warp) {
    Dequantizer(params, query_map, rope_map, smem, warp, threadIdx.x % 32).work_through();
  });
}

}  // namespace pallas_attn::mla::sm90
