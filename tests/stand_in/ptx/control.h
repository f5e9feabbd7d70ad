#pragma once

#include "device.h"

namespace pallas_attn::ptx {

inline stand_in::Meeting& named_barrier(int id, int threads) {
  stand_in::Meeting& meeting = stand_in::cta().named[id];
  if (meeting.arrived > 0 && meeting.size != threads) stand_in::fail("two counts at named barrier", id);
  meeting.size = threads;
  return meeting;
}
inline void named_barrier_sync(int id, int threads) { named_barrier(id, threads).wait(); }
inline void named_barrier_sync_unaligned(int id, int threads) { named_barrier(id, threads).wait(); }
inline bool named_barrier_any(int id, int threads, bool flag) {
  return named_barrier(id, threads).wait(flag);
}
inline void named_barrier_arrive(int id, int threads) { named_barrier(id, threads).arrive(); }

inline int lane() { return stand_in::lane(); }
inline int block_x() { return static_cast<int>(blockIdx.x); }
inline int block_z() { return static_cast<int>(blockIdx.z); }

inline float another(float x) { return x; }
template <typename T>
T* another(T* x) {
  return x;
}

template <int kCount>
void raise_registers() {}
template <int kCount>
void lower_registers() {}
inline void allow_dependent_launch() {}
inline void wait_for_previous_kernel() {}

}  // namespace pallas_attn::ptx
