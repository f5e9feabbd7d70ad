// Which requests of a schedule were cut, and merging them all: device code that the blocks of a grid run
// together, each going through the same list.
#pragma once

#include "mla/combine/combine.h"
#include "mla/params.h"
#include "mla/partials.h"
#include "sm90/merge.h"

namespace pallas_attn::mla {

// Some of the requests that were cut.
struct CutList {
  // Inside the decode kernel there is one list, so the host asks whether it holds all requests that can have
  // been cut (launch_plan.h).
  static constexpr int kCapacity = 256;

  CutRequest cut[kCapacity];  // those of few splits from the front, those of many from the back
  int few, many;
  bool any;  // including those of so few splits that they are not listed

  // Number i, those of few splits first.
  __device__ CutRequest at(int i) const { return cut[i < few ? i : kCapacity - 1 - (i - few)]; }
};

__device__ inline MergeView merge_view(const DecodeParams& params) {
  return {params.partial_out, params.partial_lse, params.sinks,        params.out,
          params.lse,         params.all_rows(),  params.num_kv_heads, params.group};
}

// Whatever the schedule says, the partial results read are ones there is room for.
__device__ inline CutRequest cut_request(const DecodeParams& params, int request) {
  const int before = params.num_splits[request], end = params.num_splits[request + 1];
  const int first_partial = first_partial_of(params, request, before);
  return {request, first_partial, at_most(params.num_partials() - first_partial, at_least(0, end - before))};
}

// No more requests are cut than there are parts.
__device__ inline int num_cut_candidates(const DecodeParams& params) {
  return min(params.batch, params.num_sm_parts);
}

// By one warp: candidates from `first` on, as many as the list holds, with more than `least` splits. A batch
// larger than the number of parts is reached through the schedule: exactly the parts whose first request is
// in its second split mark a request that was cut. The same list, in the same order, in every block.
__device__ inline void list_cut_requests(const DecodeParams& params, CutList& list, int first, int least,
                                         int lane) {
  constexpr int kFewSplits = 8;
  const int end = min(num_cut_candidates(params), first + CutList::kCapacity);
  int few = 0, many = 0;
  bool any = false;
  for (int base = first; base < end; base += 32) {
    const int i = base + lane;
    CutRequest found = {};
    if (i < end) {
      if (params.batch <= params.num_sm_parts) {
        found = cut_request(params, i);
      } else {
        const int* part = params.schedule + i * kScheduleFields;
        const int request = part[kBeginRequest];
        if (part[kBeginSplit] == 1 && request >= 0 && request < params.batch) {
          found = cut_request(params, request);
        }
      }
    }
    const bool is_many = found.splits > kFewSplits;
    const bool is_few = found.splits > least && !is_many;
    const unsigned few_lanes = __ballot_sync(0xffffffff, is_few);
    const unsigned many_lanes = __ballot_sync(0xffffffff, is_many);
    const unsigned lanes_below = (1u << lane) - 1;
    if (is_few) list.cut[few + __popc(few_lanes & lanes_below)] = found;
    if (is_many) list.cut[CutList::kCapacity - 1 - many - __popc(many_lanes & lanes_below)] = found;
    few += __popc(few_lanes);
    many += __popc(many_lanes);
    any |= __any_sync(0xffffffff, found.splits > 1);
  }
  if (lane == 0) {
    list.few = few;
    list.many = many;
    list.any = any;
  }
}

// By the first 256 threads of block `block` of `num_blocks`, which meet at a named barrier.
template <typename Element>
__device__ __forceinline__ void merge_cuts(const DecodeParams& params, const CutList& list,
                                           MergeScratch<kLatentDim>& scratch, int block, int num_blocks,
                                           int thread, int barrier) {
  // From this many a block on, a row of many splits is better left to one warp than the block to one row.
  constexpr int kManyRows = 3;
  const MergeView view = merge_view(params);
  const int rows_of_many = list.many * view.rows;
  const bool by_warp = rows_of_many >= kManyRows * num_blocks;
  merge_rows_by_warp<Element, kLatentDim>(
      view, thread / 32 * num_blocks + block, (list.few + (by_warp ? list.many : 0)) * view.rows,
      kMergeWarps * num_blocks, thread % 32, [&](int i) { return list.at(i); });
  if (by_warp) return;
  int parity = 0;
  for (int unit = block; unit < rows_of_many; unit += num_blocks, parity ^= 1) {
    merge_row_by_block<Element, kLatentDim, kLatentDim / kMergeColumns, 5>(
        view, list.at(list.few + unit / view.rows), unit % view.rows, 0, scratch, parity, thread, barrier);
  }
}

}  // namespace pallas_attn::mla
