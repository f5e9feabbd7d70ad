// Two neighbouring rows of a layout, of 64 queries each, as the list of a tile of 128: a block stands there
// once, and says which half of the tile sees it. A warp each.
#pragma once

#include <cstdint>

#include "attention/lists.h"
#include "attention/params.h"

namespace pallas_attn::attention {

constexpr int kUniteWarps = 8;

// Where rows up to this one begin, or end: the farthest place. A row that begins before it would have the
// room of another.
__device__ __forceinline__ int farthest_before(const int* pointers, int row, int lane) {
  int farthest = 0;
  for (int i = lane; i <= row; i += 32) farthest = max(farthest, __ldg(pointers + i));
  return __reduce_max_sync(~0u, farthest);
}

// A row's columns, of which it has none if they cannot be right.
struct Row {
  const int* blocks;
  int64_t first = 0;  // among the blocks: nvcc 13.0 loses what is added to a pointer between early returns
  int count = 0;
  bool bad;

  __device__ Row(const KeyLists& lists, int head, int row, int lane) : blocks(lists.blocks) {
    bad = row >= lists.rows;
    if (bad) return;
    const int* pointers = lists.row_pointers + int64_t{head} * (lists.rows + 1);
    const int begin = __ldg(pointers + row), end = __ldg(pointers + row + 1);
    bad = begin < farthest_before(pointers, row, lane) || end < begin || end > lists.pitch;
    if (bad) return;
    first = int64_t{head} * lists.pitch + begin;
    bool wrong = false;
    for (int i = lane; i < end - begin; i += 32) {
      const int column = this->column(i), before = i > 0 ? this->column(i - 1) : -1;
      wrong |= column <= before || column > row;
    }
    bad = __any_sync(~0u, wrong);
    if (!bad) count = end - begin;
  }

  __device__ int column(int i) const { return __ldg(blocks + first + i); }

  // How many are below `column`.
  __device__ int below(int column) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (this->column(middle) < column) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ bool holds(int column) const {
    const int place = below(column);
    return place < count && this->column(place) == column;
  }
};

// Writes, behind `written` entries, those of the row's first `count` columns which are in the other row, or
// those which are not. How many there are then.
__device__ __forceinline__ int append(int* list, int written, const Row& row, int count, const Row& other,
                                      bool shared, int flags, int lane) {
  for (int base = 0; base < count; base += 32) {
    const int i = base + lane;
    const int column = i < count ? row.column(i) : 0;
    const bool chosen = i < count && other.holds(column) == shared;
    const uint32_t lanes = __ballot_sync(~0u, chosen);
    if (chosen) list[written + __popc(lanes & ((1u << lane) - 1))] = column | flags;
    written += __popc(lanes);
  }
  return written;
}

__global__ void __launch_bounds__(kUniteWarps * 32) unite_kernel(const __grid_constant__ KeyLists lists) {
  const int lane = threadIdx.x % 32, pairs = united_rows(lists);
  const int number = blockIdx.x * kUniteWarps + threadIdx.x / 32;
  if (number >= lists.heads * pairs) return;
  const int head = number / pairs, first = number % pairs * 2;  // row, and block of the tile's own positions
  const Row upper(lists, head, first, lane), lower(lists, head, first + 1, lane);
  // Where the rows' own columns stood there is room for what is listed once.
  const int64_t begin = upper.bad ? lower.first : upper.first;
  int* const list = lists.united + begin;
  const int upper_past = upper.below(first), lower_past = lower.below(first);
  UnitedRow row;
  row.begin = static_cast<int>(begin - int64_t{head} * lists.pitch);
  row.whole = append(list, 0, upper, upper_past, lower, true, 0, lane);
  row.past = append(list, row.whole, upper, upper_past, lower, false, kSeenByUpper, lane);
  row.past = append(list, row.past, lower, lower_past, upper, false, kSeenByLower, lane);
  row.count = row.past;
  for (int own = first; own < first + 2; ++own) {
    const int flags = (upper.holds(own) ? kSeenByUpper : 0) | (lower.holds(own) ? kSeenByLower : 0);
    if (flags == 0) continue;
    if (lane == 0) list[row.count] = own | flags;
    ++row.count;
  }
  row.bad = (upper.bad ? 1 : 0) | (lower.bad ? 2 : 0);
  if (lane == 0) lists.united_row[number] = row;
}

}  // namespace pallas_attn::attention
