// Copies of 16 bytes by a thread, from global to shared memory without a stay in registers. They are ordinary
// stores to other threads: wgmma sees them behind fence_async_shared.
#pragma once

#include <cstdint>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

// Zeros where the source does not exist: its address may be any multiple of 16.
__device__ __forceinline__ void copy_async(uint32_t shared_destination, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_destination), "l"(source),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Four bytes, through the L1.
__device__ __forceinline__ void copy_word_async(uint32_t shared_destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_destination), "l"(source) : "memory");
}

// The thread arrives at an mbarrier when all copies that it has begun so far are done. What it wrote itself
// is not told by this.
__device__ __forceinline__ void arrive_behind_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Copies that the thread has begun since it last closed a group are one; until all groups but the last
// kGroups are done.
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Until all copies that the thread has begun are done.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace pallas_attn::ptx
