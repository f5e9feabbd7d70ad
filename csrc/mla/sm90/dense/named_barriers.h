// Named barriers of the dense Hopper kernel, each named after the event it announces. Barrier 0 is
// __syncthreads.
#pragma once

#include "mla/sm90/dense/config.h"
#include "ptx/control.h"

namespace pallas_attn::mla::sm90 {

enum NamedBarrier {
  // An even page's probabilities, running maximum and rescale factors are in shared memory.
  // Arrives: left warpgroup. Waits: right warpgroup.
  kEvenProbabilitiesReady = 1,
  // The same for an odd page. Arrives: right warpgroup. Waits: left warpgroup.
  //
  // The two alternate strictly: nobody publishes page i + 1 before having waited for page i.
  kOddProbabilitiesReady = 2,
  // Both warpgroups have published their row sums of this tile. Both arrive and wait.
  kRowSumsReady = 3,
  // The slots beyond the sequence's end have been zeroed in the last page. Within one warpgroup: the page's
  // owner.
  kLeftTailCleared = 4,
  kRightTailCleared = 5,
  // Shared memory lists the requests that were cut. Arrives: a warp without other work. Wait: both
  // warpgroups, at the end.
  kCutsKnown = 7,
  // While partial results are merged, when all of the above are done with. Both warpgroups arrive and wait.
  kMerging = 6,
};

__device__ __forceinline__ void announce(NamedBarrier event) {
  ptx::named_barrier_arrive(event, kConsumerThreads);
}
__device__ __forceinline__ void await(NamedBarrier event) {
  ptx::named_barrier_sync(event, kConsumerThreads);
}

}  // namespace pallas_attn::mla::sm90
