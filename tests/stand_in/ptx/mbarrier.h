#pragma once

#include "ptx/shared.h"

namespace pallas_attn::ptx {

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  stand_in::barrier_at(barrier) = {0, count, count, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* barrier) { stand_in::barrier_at(barrier).arrive(); }
inline void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  stand_in::barrier_at(barrier).arrive(static_cast<int>(bytes));
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (stand_in::barrier_at(barrier).phase == parity) stand_in::let_others_run();
}

}  // namespace pallas_attn::ptx
