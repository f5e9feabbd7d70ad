// A CTA of a decode kernel from its start to its end: two math warpgroups and a third one that feeds them, in
// the way of the kernel at hand.
#pragma once

#include <cooperative_groups.h>
#include <cuda.h>

#include "mla/combine/combine.h"
#include "mla/sm90/dense/last_run.h"
#include "mla/sm90/dense/mainloop.h"
#include "ptx/cluster.h"
#include "ptx/control.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

// Who arrives when a piece is there, and when the rotary one is: one thread where the copy engine fills them.
__device__ __forceinline__ void init_barriers(SmemPlan& smem, int ctas = 1, int writers = 1,
                                              int rope_writers = 1) {
  // Every warp that reads arrives: those of one warpgroup of each CTA for a half of a page, all of this
  // one for the query.
  smem.pages.init(ctas * kWarpgroupWarps, writers, rope_writers);
  smem.query.init(kHalves * kWarpgroupWarps, 1, 1);
  for (int half = 0; half < kHalves; ++half) {
    for (int warp = 0; warp < kWarpgroupWarps; ++warp) ptx::mbarrier_init(&smem.partial_full[half][warp], 1);
  }
  ptx::mbarrier_init_fence();
}

// The threads of the third warpgroup have returned, which the grid's barrier allows: it meets a block's
// threads at its barrier 0, and since Volta that is complete when all threads have come that have not exited
// (CUDA Programming Guide, "Independent Thread Scheduling" of compute capability 7.x). Thread 0, which speaks
// for the block, is of the even warpgroup.
__device__ __forceinline__ void meet_all_blocks() { cooperative_groups::this_grid().sync(); }

// Behind the last products of the CTA, by the math warpgroups: the last run is stored, and what was cut over
// several CTAs merged if that happens inside.
//
//   merging         last run         cuts in the batch  what happens
//   kNothingIsCut   whole            none               stored
//   kKernelFollows  whole or split   not asked          stored
//   kInside         whole            none               stored
//   kInside         whole or split   some               stored; all CTAs meet; the rest merged
//   kInside         first of few     some               all CTAs meet; others added, stored; the rest merged
//   kInside         first of few     none               stored as it is (not a schedule of this batch)
template <typename Element, bool kMerges, typename Plan, typename Last>
__device__ __forceinline__ void finish(const DecodeParams& params, Plan& smem, Last& last, const PageRun& run,
                                       Merging merging) {
  if constexpr (!kMerges) {
    if (run.request >= 0) last.store(false);
    return;
  }
  const bool inside = merging == Merging::kInside;
  // The first of a request's few splits waits, takes in the others' partial results and writes the output:
  // half as much to write and to read as if every split left its own.
  const bool kept = inside && run.kept_splits > 0;
  if (run.request >= 0 && !kept) last.store(inside);
  if (!inside) return;
  ptx::named_barrier_sync(kCutsKnown, kConsumerThreads + 32);
  if (smem.cuts.any) {
    meet_all_blocks();
    if (kept) last.add_partials();
  }
  if (kept) last.store_final(smem.cuts.any);
  if (smem.cuts.few + smem.cuts.many > 0) {
    // Shared memory may still be read above.
    ptx::named_barrier_sync(kMerging, kConsumerThreads);
    const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int num_ctas = gridDim.x * gridDim.y * gridDim.z;
    merge_cuts<Element>(params, smem.cuts, smem.merge_scratch(), cta, num_ctas, threadIdx.x, kMerging);
  }
}

// `feed(warp)` is what the third warpgroup does, each warp by itself.
template <typename Element, typename Source, typename Mask, typename Feed>
__device__ __forceinline__ void run_decode_cta(const DecodeParams& params, SmemPlan& smem,
                                               const CUtensorMap& out_map, Merging merging, Feed feed) {
  constexpr int kConsumers = Source::Budget::kRegisters, kFeeder = Source::Budget::kFeederRegisters;
  static_assert(2 * kConsumers + kFeeder <= 3 * 168);
  const int row_tile = blockIdx.x;
  const int part = blockIdx.y;
  const int kv_head = blockIdx.z;
  // Barriers are ready, those of the cluster's other CTA too.
  if constexpr (Source::kCtas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  // Launched behind whatever runs before it (see launch_impl.h): nothing of this kernel's input is read
  // above.
  ptx::wait_for_previous_kernel();
  RunResult result;
  result.run = {};
  result.run.request = -1;
  // Through a shuffle, so that the compiler knows the roles' branch to be uniform in a warp: it serialises
  // wgmma otherwise.
  const int role = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  if (role == kEven) {
    ptx::raise_registers<kConsumers>();
    EvenWarpgroup<Element, Source, Mask>(params, smem, result, kv_head, row_tile, thread).work_through(part);
  } else if (role == kOdd) {
    ptx::raise_registers<kConsumers>();
    OddWarpgroup<Element, Source, Mask>(params, smem, result, kv_head, row_tile, thread).work_through(part);
  } else {
    ptx::lower_registers<kFeeder>();
    feed(__shfl_sync(0xffffffff, thread / 32, 0));
    // The rest is not for the few registers of these warps.
    return;
  }

  // This CTA tells the other nothing more.
  if constexpr (Source::kCtas > 1) ptx::cluster_arrive();
  // Not by half_of(): a comparison costs registers from the roles' branch on, and spills.
  const OutputPlace place = {kv_head, row_tile, static_cast<Half>(role)};
  LastRun<Element> last(params, smem, out_map, place, thread, result);
  finish<Element, Source::Budget::kMerges>(params, smem, last, result.run, merging);
  if constexpr (Source::kCtas > 1) ptx::cluster_wait();
  // Only for our own kernel: others may load what they take to be constant before they wait for this one. And
  // at the end, though it could wait from the start: its blocks would then all sit on the few SMs without
  // work, and stay there.
  if (merging == Merging::kKernelFollows) ptx::allow_dependent_launch();
}

// By one warp of the third warpgroup, if CTAs merge what they have cut.
__device__ __forceinline__ void tell_cuts(const DecodeParams& params, CutList& cuts) {
  list_cut_requests(params, cuts, 0, kMostKeptSplits, threadIdx.x % 32);
  ptx::named_barrier_arrive(kCutsKnown, kConsumerThreads + 32);
}

}  // namespace pallas_attn::mla::sm90
