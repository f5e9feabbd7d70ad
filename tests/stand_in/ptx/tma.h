#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>

#include "common/tensor_tile.h"
#include "ptx/mbarrier.h"

namespace pallas_attn::ptx {

// At once, or some time later.
inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier, uint64_t = 0) {
  stand_in::expect_aligned("a copy to", shared_address(to), 16);
  stand_in::expect_aligned("a copy from", reinterpret_cast<uint64_t>(from), 16);
  stand_in::expect_aligned("a copy's bytes", bytes, 16);
  stand_in::begin({[=] {
    std::memcpy(to, from, bytes);
    stand_in::count_landed(barrier, bytes);
  }});
}

// What stands in for a tensor map, in its memory.
template <int kRank>
struct Map {
  TensorTile<kRank> tile;
  uint32_t element_bytes, swizzled;
};
static_assert(sizeof(Map<5>) <= sizeof(CUtensorMap));

inline void tma_prefetch_descriptor(const CUtensorMap*) {}

// Innermost dimension first, as its elements lie in shared memory.
template <int kRank>
void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, const int (&first)[kRank]) {
  Map<kRank> box;
  std::memcpy(&box, map, sizeof(box));
  stand_in::expect_aligned("a box at", shared_address(to), box.swizzled ? 1024 : 128);
  std::array<int64_t, kRank> begin;
  std::copy(first, first + kRank, begin.begin());
  stand_in::begin({[=] {
    const TensorTile<kRank>& tile = box.tile;
    const uint32_t bytes = box.element_bytes;
    uint32_t at = shared_address(to), elements = 1;
    for (uint32_t extent : tile.box) elements *= extent;
    for (uint32_t i = 0; i < elements; ++i, at += bytes) {
      const char* from = static_cast<const char*>(tile.base);
      bool inside = true;
      uint32_t rest = i;
      for (int d = 0; d < kRank; rest /= tile.box[d++]) {
        const int64_t index = begin[d] + rest % tile.box[d];
        inside &= index >= 0 && static_cast<uint64_t>(index) < tile.extent[d];
        from += index * static_cast<int64_t>(d == 0 ? bytes : tile.strides_bytes[d - 1]);
      }
      const uint32_t byte = box.swizzled ? at ^ (at >> 7 & 7) << 4 : at;
      if (inside) std::memcpy(stand_in::shared + byte, from, bytes);
      if (!inside) std::memset(stand_in::shared + byte, 0, bytes);
    }
    stand_in::count_landed(barrier, elements * bytes);
  }});
}
inline void tma_load_4d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
  load_box<4>(to, map, barrier, {c0, c1, c2, c3});
}
inline void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3,
                        int c4) {
  load_box<5>(to, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_load_5d(void* to, const CUtensorMap* map, uint64_t* barrier, uint64_t, int c0, int c1, int c2,
                        int c3, int c4) {
  load_box<5>(to, map, barrier, {c0, c1, c2, c3, c4});
}

inline void bulk_prefetch(const void* source, uint32_t bytes) {
  stand_in::expect_aligned("a prefetch of", reinterpret_cast<uint64_t>(source), 16);
  stand_in::expect_aligned("a prefetch's bytes", bytes, 16);
}

// Shared memory is read some time before global memory is written.
template <typename Write>
void bulk_out(void* to, const void* from, uint32_t bytes, Write write) {
  stand_in::expect_aligned("a copy to", reinterpret_cast<uint64_t>(to), 16);
  stand_in::expect_aligned("a copy from", shared_address(from), 16);
  stand_in::expect_aligned("a copy's bytes", bytes, 16);
  stand_in::Fiber* const fiber = stand_in::self;
  ++fiber->reading, ++fiber->writing;
  const uint32_t at = shared_address(from);
  stand_in::begin({[=] {
    const std::vector<char> read(stand_in::shared + at, stand_in::shared + at + bytes);
    --fiber->reading;
    stand_in::begin({[=] {
      write(to, read);
      --fiber->writing;
    }});
  }});
}
inline void bulk_store(void* to, const void* from, uint32_t bytes) {
  bulk_out(to, from, bytes,
           [](void* at, const std::vector<char>& read) { std::memcpy(at, read.data(), read.size()); });
}
inline void bulk_add(float* to, const float* from, uint32_t bytes) {
  bulk_out(to, from, bytes, [](void* at, const std::vector<char>& read) {
    for (size_t i = 0; i < read.size() / sizeof(float); ++i) {
      float v;
      std::memcpy(&v, read.data() + i * sizeof(float), sizeof(float));
      static_cast<float*>(at)[i] += v;
    }
  });
}
inline void close_stores() {}
inline void wait_until_stores_have_read() {
  while (stand_in::self->reading > 0) stand_in::let_others_run();
}
inline void wait_until_stores_are_done() {
  while (stand_in::self->writing > 0) stand_in::let_others_run();
}

// Without a stand-in, as in shared.h.
void tma_load_3d(void*, const CUtensorMap*, uint64_t*, uint64_t, int, int, int);
void tma_store_3d(const CUtensorMap*, const void*, uint64_t, int, int, int);

}  // namespace pallas_attn::ptx
