// Math warpgroups take turns at issuing products. One is held while it issues that of probabilities in
// registers, as long as that takes: the others' exponentials run beside. Else all do the same at the same
// time.
#pragma once

#include "attention/sm90/forward/config.h"
#include "ptx/control.h"

namespace pallas_attn::attention::sm90 {

// Barrier 0 is __syncthreads.
enum NamedBarrier {
  // Values that nobody sees are zero. All math warpgroups arrive and wait.
  kUnseenCleared = 1,
  kTurn = 2,  // to issue products, of the first warpgroup, and one more of each other one
};

template <int kMath>
struct Turns {
  static constexpr int kThreads = 2 * kWarpgroupThreads;  // the one that passes it and the one that takes it
  int warpgroup;

  __device__ __forceinline__ void take() const { ptx::named_barrier_sync(kTurn + warpgroup, kThreads); }
  __device__ __forceinline__ void pass() const {
    ptx::named_barrier_arrive(kTurn + (warpgroup + 1) % kMath, kThreads);
  }
  __device__ __forceinline__ void let_pass() const {
    take();
    pass();
  }
};

}  // namespace pallas_attn::attention::sm90
