// Named barriers of this kernel, beside those of dense/named_barriers.h that the end of a CTA uses:
// kCutsKnown and kMerging.
#pragma once

#include "mla/sm90/dense/named_barriers.h"

namespace pallas_attn::mla::sm90::transposed {

enum TransposedBarrier {
  // A page's probabilities, and all that belongs to them, are in shared memory; and those of the page before,
  // which the other warpgroup owns, have been multiplied with, so that their places may be used again.
  // Arrives: the page's owner. Waits: the other warpgroup. The two take turns.
  kProbabilitiesReady = 1,  // and 2
  // The run's sums are in shared memory, and nobody needs its query any more. Both arrive and wait.
  kSumsReady = 3,
  // Within a warpgroup, one after the other.
  kWithin = 4,  // and 5
  // The run's query is in shared memory, and what runs keep there reset. Both arrive and wait.
  kQueryReady = 8,
};
static_assert(int{kSumsReady} < int{kMerging});
static_assert(int{kQueryReady} > int{kCutsKnown});

__device__ __forceinline__ void announce_probabilities(int owner) {
  ptx::named_barrier_arrive(kProbabilitiesReady + owner, kConsumerThreads);
}
__device__ __forceinline__ void await_probabilities(int owner) {
  ptx::named_barrier_sync(kProbabilitiesReady + owner, kConsumerThreads);
}
__device__ __forceinline__ void meet_within(int owner) {
  ptx::named_barrier_sync(kWithin + owner, kWarpgroupThreads);
}

}  // namespace pallas_attn::mla::sm90::transposed
