// Copies of 16 bytes by a thread, from global to shared memory without a stay in registers. They are ordinary
// stores to other threads: wgmma sees them behind fence_async_shared.
#pragma once

#include <cstdint>

namespace pallas_attn::ptx {

// Zeros where the source does not exist; the address must be a valid one all the same.
__device__ __forceinline__ void copy_async(uint32_t shared_destination, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_destination), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}

// The thread's copies since the last time become a group.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the newest `kPending` groups of the thread are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace pallas_attn::ptx
