// The dense Hopper MLA decode kernel. The README beside params.h draws its schedule.
#pragma once

#include <cooperative_groups.h>
#include <cuda.h>

#include <utility>

#include "mla/combine/merge.h"
#include "mla/sm90/dense/left_warpgroup.h"
#include "mla/sm90/dense/load.h"
#include "mla/sm90/dense/right_warpgroup.h"
#include "ptx/control.h"

namespace pallas_attn::mla::sm90 {

__device__ __forceinline__ void init_barriers(SmemPlan& smem) {
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    for (int piece = 0; piece < kPieces; ++piece) ptx::mbarrier_init(&smem.kv_full[buffer][piece], 1);
    // Every warp of the warpgroup that frees the part arrives.
    for (int part = 0; part < kBufferParts; ++part)
      ptx::mbarrier_init(&smem.kv_empty[buffer][part], kSideWarps);
  }
  ptx::mbarrier_init(&smem.query_full, 1);
  ptx::mbarrier_init(&smem.query_empty, kSides * kSideWarps);
  ptx::mbarrier_init_fence();
}

// Who merges the partial results of requests that were cut.
enum class Merging { kNothingIsCut, kInside, kKernelFollows };

template <typename Element>
__global__ void __launch_bounds__(kThreads, 1)
    dense_decode_kernel(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap cache_map, const Merging merging) {
  extern __shared__ __align__(1024) char shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  const int row_tile = blockIdx.x;
  const int part = blockIdx.y;
  const int kv_head = blockIdx.z;

  if (threadIdx.x == 0) {
    init_barriers(smem);
    ptx::tma_prefetch_descriptor(&query_map);
    ptx::tma_prefetch_descriptor(&cache_map);
  }
  __syncthreads();
  // Launched behind whatever runs before it (see launch_impl.h): nothing of this kernel's input is read
  // above.
  ptx::wait_for_previous_kernel();
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kSideThreads, 0);
  if (role == kLeft) {
    ptx::raise_registers<kConsumerRegisters>();
    LeftWarpgroup<Element>(params, smem, kv_head, row_tile, threadIdx.x).run(part);
  } else if (role == kRight) {
    ptx::raise_registers<kConsumerRegisters>();
    RightWarpgroup<Element>(params, smem, kv_head, row_tile, threadIdx.x - kSideThreads).run(part);
  } else {
    ptx::lower_registers<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == kConsumerThreads / 32) {
      Producer(params, query_map, cache_map, smem, kv_head, row_tile, threadIdx.x - kConsumerThreads)
          .run(part);
    } else if (warp == kConsumerThreads / 32 + 1 && merging == Merging::kInside) {
      // Asked for now, because at the end the answer would be waited for.
      smem.any_cut = __ldg(params.num_splits + params.batch) > params.batch;
      ptx::named_barrier_arrive(kCutsKnown, kConsumerThreads + 32);
    }
    // The rest is not for the few registers of these warps.
    return;
  }
  if (merging == Merging::kInside) ptx::named_barrier_sync(kCutsKnown, kConsumerThreads + 32);
  if (merging == Merging::kInside && smem.any_cut) {
    // All CTAs of the grid meet; the threads that have returned do not count.
    const auto grid = cooperative_groups::this_grid();
    auto arrival = grid.barrier_arrive();
    const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int num_ctas = gridDim.x * gridDim.y * gridDim.z;
    Merger<Element, kMerging> merger(params, smem.merge_scratch(), cta, num_ctas, threadIdx.x);
    merger.prepare();
    grid.barrier_wait(std::move(arrival));
    merger.run();
  }
  // Only for our own kernel: others may load what they take to be constant before they wait for this one. And
  // at the end, though it could wait from the start: its blocks would then all sit on the few SMs without
  // work, and stay there.
  if (merging == Merging::kKernelFollows) ptx::allow_dependent_launch();
}

}  // namespace pallas_attn::mla::sm90
