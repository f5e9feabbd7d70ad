// Buffers that one side fills and the other empties, over and over, and the mbarriers by which they tell each
// other. A buffer may be filled and emptied in slices, each with a barrier of its own.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.h"

namespace pallas_attn {
inline namespace sm90 {

// In shared memory. Full: the copy has landed, or its writers are done. Empty: the slice may be overwritten.
template <int kStages, int kFullSlices, int kEmptySlices>
struct Ring {
  uint64_t full[kStages][kFullSlices];
  uint64_t empty[kStages][kEmptySlices];

  // A slice is empty when `readers` have arrived, and full when `writers` have, or those of the last slice.
  // Who has bytes copied is one writer, and the bytes are waited for too. By one thread.
  __device__ void init(uint32_t readers, uint32_t writers, uint32_t last_slice_writers) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int slice = 0; slice < kFullSlices; ++slice) {
        ptx::mbarrier_init(&full[stage][slice], slice == kFullSlices - 1 ? last_slice_writers : writers);
      }
      for (int slice = 0; slice < kEmptySlices; ++slice) ptx::mbarrier_init(&empty[stage][slice], readers);
    }
  }
};

// Where one role is with the buffers of a ring, in its registers: how often it has been through each, modulo
// two. A buffer begins empty, so who fills it does not wait the first time.
template <int kStages>
class Phases {
 public:
  // What to wait for before reading, and before overwriting.
  __device__ uint32_t full(int stage = 0) const {
    if constexpr (kStages == 1) return bits_;
    return bits_ >> stage & 1;
  }
  __device__ uint32_t empty(int stage = 0) const { return full(stage) ^ 1; }

  __device__ void advance(int stage = 0) { bits_ ^= 1u << stage; }

 private:
  uint32_t bits_ = 0;
};

// To the next buffer.
template <int kStages>
__device__ __forceinline__ void advance(int& stage, Phases<kStages>& phases) {
  phases.advance(stage);
  stage = (stage + 1) % kStages;
}

// A warp, to which `thread` belongs, is done with a buffer.
__device__ __forceinline__ void release(uint64_t* empty, int thread) {
  __syncwarp();
  if (thread % 32 == 0) ptx::mbarrier_arrive(empty);
}

}  // namespace sm90
}  // namespace pallas_attn
