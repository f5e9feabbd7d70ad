#pragma once

#include "ptx/mbarrier.h"

namespace pallas_attn::ptx {

// They land where the thread waits for them, or some time after it has arrived behind them.
inline void copy_async(uint32_t to, const void* from, bool exists) {
  stand_in::expect_aligned("a copy to", to, 16);
  stand_in::expect_aligned("a copy from", reinterpret_cast<uint64_t>(from), 16);
  stand_in::self->copies.push_back([=] {
    if (exists) std::memcpy(stand_in::shared + to, from, 16);
    if (!exists) std::memset(stand_in::shared + to, 0, 16);
  });
}
inline void arrive_behind_copies(uint64_t* barrier) {
  std::vector<std::function<void()>> mine;
  std::swap(mine, stand_in::self->copies);
  stand_in::begin({[=] {
    for (const auto& copy : mine) copy();
    mbarrier_arrive(barrier);
  }});
}
inline void wait_for_copies() {
  for (const auto& copy : stand_in::self->copies) copy();
  stand_in::self->copies.clear();
}

}  // namespace pallas_attn::ptx
