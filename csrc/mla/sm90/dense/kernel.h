// The dense Hopper MLA decode kernel. The README beside params.h draws its schedule.
#pragma once

#include <cooperative_groups.h>
#include <cuda.h>

#include "mla/combine/combine.h"
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
  for (int side = 0; side < kSides; ++side) {
    for (int warp = 0; warp < kSideWarps; ++warp) ptx::mbarrier_init(&smem.partial_full[side][warp], 1);
  }
  ptx::mbarrier_init_fence();
}

template <typename Element>
__global__ void __launch_bounds__(kThreads, 1)
    dense_decode_kernel(const __grid_constant__ DecodeParams params,
                        const __grid_constant__ CUtensorMap query_map,
                        const __grid_constant__ CUtensorMap cache_map,
                        const __grid_constant__ CUtensorMap out_map, const Merging merging) {
  extern __shared__ __align__(1024) char shared_memory[];
  SmemPlan& smem = *reinterpret_cast<SmemPlan*>(shared_memory);
  const int row_tile = blockIdx.x;
  const int part = blockIdx.y;
  const int kv_head = blockIdx.z;

  if (threadIdx.x == 0) {
    init_barriers(smem);
    ptx::tma_prefetch_descriptor(&query_map);
    ptx::tma_prefetch_descriptor(&cache_map);
    ptx::tma_prefetch_descriptor(&out_map);
  }
  __syncthreads();
  // Launched behind whatever runs before it (see launch_impl.h): nothing of this kernel's input is read
  // above.
  ptx::wait_for_previous_kernel();
  TileResult last;
  last.tile = {};
  last.tile.request = -1;
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kSideThreads, 0);
  const int thread = threadIdx.x % kSideThreads;
  if (role == kLeft) {
    ptx::raise_registers<kConsumerRegisters>();
    LeftWarpgroup<Element>(params, smem, last, kv_head, row_tile, thread).run(part);
  } else if (role == kRight) {
    ptx::raise_registers<kConsumerRegisters>();
    RightWarpgroup<Element>(params, smem, last, kv_head, row_tile, thread).run(part);
  } else {
    ptx::lower_registers<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == kConsumerThreads / 32) {
      Producer(params, query_map, cache_map, smem, kv_head, row_tile, thread).run(part);
    } else if (warp == kConsumerThreads / 32 + 1 && merging == Merging::kInside) {
      list_cut_requests(params, smem.cuts, 0, kMostKeptSplits, threadIdx.x % 32);
      ptx::named_barrier_arrive(kCutsKnown, kConsumerThreads + 32);
    }
    // The rest is not for the few registers of these warps.
    return;
  }

  const TilePlace place = {kv_head, row_tile, role};
  const FragmentPosition at(thread);
  const int lane = thread % 32;
  const bool merges = merging == Merging::kInside;
  // The first of a request's few splits waits, takes in the others' partial results and writes the output:
  // half as much to write and to read as if every split left its own.
  const bool keeps = merges && last.tile.kept_splits > 0;
  if (last.tile.request >= 0 && !keeps) {
    store_last_tile<Element>(params, place, last, at, lane, merges, smem, out_map);
  }
  if (merges) ptx::named_barrier_sync(kCutsKnown, kConsumerThreads + 32);
  if (merges && smem.cuts.any) {
    // All CTAs of the grid meet; the threads that have returned do not count.
    cooperative_groups::this_grid().sync();
    if (keeps) {
      add_partials(params, place, at, lane, smem, last);
      last.tile.partial_slot = -1;
      store_last_tile<Element>(params, place, last, at, lane, merges, smem, out_map);
    }
    if (smem.cuts.few + smem.cuts.many > 0) {
      // Shared memory may still be read above.
      ptx::named_barrier_sync(kMerging, kConsumerThreads);
      const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const int num_ctas = gridDim.x * gridDim.y * gridDim.z;
      Merger<Element, kMerging>(params, &smem.cuts, smem.merge_scratch(), cta, num_ctas, threadIdx.x).run();
    }
  }
  // Only for our own kernel: others may load what they take to be constant before they wait for this one. And
  // at the end, though it could wait from the start: its blocks would then all sit on the few SMs without
  // work, and stay there.
  if (merging == Merging::kKernelFollows) ptx::allow_dependent_launch();
}

}  // namespace pallas_attn::mla::sm90
