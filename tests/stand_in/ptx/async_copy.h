#pragma once

#include "ptx/mbarrier.h"

namespace pallas_attn::ptx {

// They land where the thread waits for them, or some time after it has arrived behind them.
inline void copy_async(uint32_t to, const void* from, bool exists) {
  stand_in::expect_aligned("a copy to", to, 16);
  stand_in::expect_aligned("a copy from", reinterpret_cast<uint64_t>(from), 16);
  stand_in::self->copies.back().push_back([=] {
    if (exists) std::memcpy(stand_in::shared + to, from, 16);
    if (!exists) std::memset(stand_in::shared + to, 0, 16);
  });
}
inline void arrive_behind_copies(uint64_t* barrier) {
  std::vector<stand_in::Group> mine(1);
  std::swap(mine, stand_in::self->copies);
  stand_in::begin({[=] {
    for (const auto& group : mine) {
      for (const auto& copy : group) copy();
    }
    mbarrier_arrive(barrier);
  }});
}
inline void copy_word_async(uint32_t to, const void* from) {
  stand_in::expect_aligned("a copy to", to, 4);
  stand_in::expect_aligned("a copy from", reinterpret_cast<uint64_t>(from), 4);
  stand_in::self->copies.back().push_back([=] { std::memcpy(stand_in::shared + to, from, 4); });
}
inline void close_copies() { stand_in::self->copies.emplace_back(); }
template <int kGroups>
void wait_for_copies_but() {
  auto& groups = stand_in::self->copies;  // the last one is not closed
  while (groups.size() > kGroups + 1) {
    for (const auto& copy : groups[0]) copy();
    groups.erase(groups.begin());
  }
}
inline void wait_for_copies() {
  close_copies();
  wait_for_copies_but<0>();
}

}  // namespace pallas_attn::ptx
