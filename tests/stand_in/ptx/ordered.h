#pragma once

#include "device.h"

namespace pallas_attn::ptx {

// Whoever asks again and again lets others go on.
inline int load_acquire(const int* from) {
  stand_in::let_others_run();
  return *from;
}
inline void store_release(int* to, int v) {
  *to = v;
  ++stand_in::events;
}
inline void add_in_memory(float* to, float v) { *to += v; }
inline void add_in_memory(float2* to, float2 v) {
  stand_in::expect_aligned("two numbers at", reinterpret_cast<uint64_t>(to), 8);
  to->x += v.x, to->y += v.y;
}

inline void add_in_memory(float4* to, float4 v) {
  stand_in::expect_aligned("four numbers at", reinterpret_cast<uint64_t>(to), 16);
  to->x += v.x, to->y += v.y, to->z += v.z, to->w += v.w;
}

}  // namespace pallas_attn::ptx
