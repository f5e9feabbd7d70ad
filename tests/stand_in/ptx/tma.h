#pragma once

#include <cuda.h>

#include "ptx/mbarrier.h"

namespace pallas_attn::ptx {

// At once, or some time later.
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t = 0) {
  stand_in::expect_aligned("a copy to", shared_address(to), 16);
  stand_in::expect_aligned("a copy from", reinterpret_cast<uint64_t>(from), 16);
  stand_in::expect_aligned("a copy's bytes", bytes, 16);
  const stand_in::Copy copy = {to, from, bytes, barrier};
  if (stand_in::random() % 2) {
    stand_in::land(copy);
  } else {
    stand_in::cta().copies.push_back(copy);
  }
}

inline void bulk_prefetch(const void* source, uint32_t bytes) {
  stand_in::expect_aligned("a prefetch of", reinterpret_cast<uint64_t>(source), 16);
  stand_in::expect_aligned("a prefetch's bytes", bytes, 16);
}

// Without a stand-in, as in shared.h.
void tma_load_3d(void*, const CUtensorMap*, uint64_t*, uint64_t, int, int, int);
void tma_store_3d(const CUtensorMap*, const void*, uint64_t, int, int, int);
void bulk_store(void*, const void*, uint32_t);
void close_stores();
void wait_until_stores_have_read();
void wait_until_stores_are_done();

}  // namespace pallas_attn::ptx
