// CTAs of one cluster: their shared memory, and the barrier at which they meet.
#pragma once

#include <cstdint>

#include "ptx/shared.h"

namespace pallas_attn::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where CTA `rank` has what is at `address` here.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Without a scope: a release for the cluster is a fence for the whole GPU in the machine code. Enough where
// nothing was written that the other CTA reads.
__device__ __forceinline__ void mbarrier_arrive_in(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Into another CTA; when it is there, an mbarrier there counts its 16 bytes.
__device__ __forceinline__ void store_async_16_bytes(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// All threads of the cluster that have not exited meet; what they did before has happened then.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

}  // namespace pallas_attn::ptx
