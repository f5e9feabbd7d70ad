// Named barriers, registers and programmatic dependent launch.
#pragma once

#include <cstdint>

namespace pallas_attn::ptx {

// `threads` counts both those who arrive and those who wait.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for waiting at different places of the program, which bar.sync does not promise to support.
__device__ __forceinline__ void named_barrier_sync_unaligned(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for threads that all wait; true in all of them if `flag` is in any.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool flag) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(flag))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// This CTA's place in the grid, asked for where it is needed: blockIdx is read once and costs registers from
// there on.
__device__ __forceinline__ int block_x() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ int block_z() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(index));
  return index;
}

// The same of the lane.
__device__ __forceinline__ int lane() {
  int index;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
  return index;
}

// The same number, another one for all the compiler knows.
__device__ __forceinline__ float another(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

template <typename T>
__device__ __forceinline__ T* another(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ int another(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Moves registers between warpgroups; every warp of the warpgroup must execute it.
template <int kCount>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The next kernel of the stream may be scheduled once every CTA has said this or exited.
__device__ __forceinline__ void allow_dependent_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Blocks until the kernels this one was launched behind have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace pallas_attn::ptx
