// Where the partial results of a request that was cut lie; params.h says why there is room.
#pragma once

#include "common/host_device.h"
#include "common/math.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// Of the first split; `splits_before` is num_splits[request]. A schedule that was not made for this call may
// say anything: it is still one of the array's, or the one just behind it.
PALLAS_ATTN_HOST_DEVICE inline int first_partial_of(const DecodeParams& params, int request,
                                                    int splits_before) {
  const int cuts_before = at_least(0, at_least(0, splits_before) - request);
  return 2 * at_most(params.num_sm_parts, cuts_before);
}

// Of any split, and always one of the array's.
PALLAS_ATTN_HOST_DEVICE inline int partial_of(const DecodeParams& params, int request, int splits_before,
                                              int split) {
  const int within = at_most(params.num_partials(), at_least(0, split));
  return at_most(params.num_partials() - 1, first_partial_of(params, request, splits_before) + within);
}

}  // namespace pallas_attn::mla
