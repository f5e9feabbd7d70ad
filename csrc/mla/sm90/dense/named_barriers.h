// Named barriers of the dense Hopper kernel, each named after the event it announces. Barrier 0 is
// __syncthreads.
#pragma once

#include "mla/sm90/dense/config.h"
#include "ptx/control.h"

namespace pallas_attn::mla::sm90 {

enum NamedBarrier {
  // An even page's probabilities, running maximum and rescale factors are in shared memory.
  // Arrives: even warpgroup. Waits: odd warpgroup.
  kEvenProbabilitiesReady = 1,
  // The same for an odd page. Arrives: odd warpgroup. Waits: even warpgroup.
  //
  // The two alternate strictly: nobody publishes page i + 1 before having waited for page i.
  kOddProbabilitiesReady = 2,
  // Both warpgroups have published their row sums of this run. Both arrive and wait.
  kRowSumsReady = 3,
  // The slots beyond the sequence's end have been zeroed in the last page. Within one warpgroup: the page's
  // owner.
  kEvenTailCleared = 4,
  kOddTailCleared = 5,
  // While partial results are merged, when all of the others are done with. Both warpgroups arrive and wait.
  kMerging = 6,
  // Shared memory lists the requests that were cut. Arrives: a warp without other work. Wait: both
  // warpgroups, at the end.
  kCutsKnown = 7,
  // A page's probabilities are in shared memory, where its owner reads them too. Within that warpgroup.
  kEvenProbabilitiesOwn = 8,
  kOddProbabilitiesOwn = 9,
};

constexpr NamedBarrier probabilities_ready(Parity page) {
  return page == kEven ? kEvenProbabilitiesReady : kOddProbabilitiesReady;
}
constexpr NamedBarrier own_probabilities(Parity page) {
  return page == kEven ? kEvenProbabilitiesOwn : kOddProbabilitiesOwn;
}
constexpr NamedBarrier tail_cleared(Parity page) {
  return page == kEven ? kEvenTailCleared : kOddTailCleared;
}

__device__ __forceinline__ void announce(NamedBarrier event) {
  ptx::named_barrier_arrive(event, kConsumerThreads);
}
__device__ __forceinline__ void await(NamedBarrier event) {
  ptx::named_barrier_sync(event, kConsumerThreads);
}

}  // namespace pallas_attn::mla::sm90
