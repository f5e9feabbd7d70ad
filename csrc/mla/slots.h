// Where the partial results of a request that was cut lie; params.h says why there is room.
#pragma once

#include "mla/params.h"

namespace pallas_attn::mla {

// Of the first split; `splits_before` is num_splits[request]. A schedule that was not made for this call may
// say anything: the slot is still one of the array's, or the one just behind it.
__device__ __forceinline__ int first_partial_slot(const DecodeParams& params, int request,
                                                  int splits_before) {
  const int cuts_before = max(splits_before, 0) - request;
  return 2 * min(max(cuts_before, 0), params.num_sm_parts);
}

__device__ __forceinline__ int partial_slot(const DecodeParams& params, int request, int splits_before,
                                            int split) {
  const int within = min(max(split, 0), params.num_slots());
  return min(first_partial_slot(params, request, splits_before) + within, params.num_slots() - 1);
}

}  // namespace pallas_attn::mla
