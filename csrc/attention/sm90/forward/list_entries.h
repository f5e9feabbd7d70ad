// What a tile's list says of its keys: found by the scout, a warp.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "attention/lists.h"
#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "common/math.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90 {

// Bits of a block lie by 64 queries and 64 keys, as a math warpgroup has their scores: a word a thread.
constexpr int kBitsSide = 64, kBitsShift = 6;

// Of a mask's list.
__device__ __forceinline__ bool find_bits(const KeyLists& lists, const List& list, ListedTile& tile) {
  const int first = __ldg(lists.first_bits + list.number), in_part = list.num_blocks - list.whole_blocks;
  if (in_part > 0 && (first < 0 || first > lists.max_bits - in_part)) return false;
  const int words = kWarpgroupThreads << (lists.k_shift - kBitsShift);  // of 64 queries
  const int within = (tile.place & ((1 << lists.q_shift) - 1)) >> kBitsShift;
  tile.bits = lists.bits + (int64_t{first} << (lists.q_shift - kBitsShift)) * words + within * words;
  tile.num_blocks = list.num_blocks;
  tile.whole_keys = list.whole_blocks << lists.k_shift;
  tile.k_len = tile.past_keys = list.num_blocks << lists.k_shift;
  tile.seen_end = INT_MAX;  // the others read as zero
  return true;
}

// Where the tile's own positions are, among the keys that the list names: they begin behind `past_keys` with
// the sequence's `first_key`, and are `most` at most.
__device__ __forceinline__ void place_own(ListedTile& tile, int k_len, int first_key, int most) {
  tile.place += tile.past_keys - first_key;
  tile.k_len = tile.seen_end = tile.past_keys + min(most, max(k_len - first_key, 0));
}
__device__ __forceinline__ void place_behind_all(ListedTile& tile) {
  tile.place = tile.k_len = tile.seen_end = tile.past_keys;
}

// Of two rows that are united.
__device__ __forceinline__ bool find_united(const KeyLists& lists, const List& list, int k_len,
                                            ListedTile& tile) {
  // Written by a kernel in front, so not through the cache for constants.
  const UnitedRow* const from = lists.united_row + list.number;
  tile.bad = __ldcg(&from->bad);
  if (tile.bad == 3) return false;
  const int past = __ldcg(&from->past);
  tile.upper_rows = kListedQueries / 2 - (tile.place & (kListedQueries - 1));
  tile.blocks = list.blocks + __ldcg(&from->begin);
  tile.bits = nullptr;
  tile.num_blocks = __ldcg(&from->count);
  tile.whole_keys = __ldcg(&from->whole) << lists.k_shift;
  tile.past_keys = past << lists.k_shift;
  if (tile.num_blocks == past) {
    place_behind_all(tile);
  } else {
    const int own = __ldcg(tile.blocks + past) & kBlockBits;
    place_own(tile, k_len, own << lists.k_shift, (tile.num_blocks - past) << lists.k_shift);
  }
  return true;
}

// Of a layout's row: where the queries' own positions are listed, these follow on all else. `k_len`: keys of
// the sequence.
__device__ __forceinline__ bool find_own(const KeyLists& lists, const List& list, int k_len, int lane,
                                         ListedTile& tile) {
  const int first = tile.place & -kListedQueries, size = 1 << lists.k_shift;
  const int own = first >> lists.k_shift, last_own = (first + kListedQueries - 1) >> lists.k_shift;
  const int64_t behind_row = int64_t{(first >> lists.q_shift) + 1} << lists.q_shift;
  const auto last = static_cast<int>((behind_row - 1) >> lists.k_shift);
  int past = 0, near = 0, nearest = INT_MAX;
  bool bad = false;
  for (int base = 0; base < list.num_blocks; base += 32) {
    const int entry = base + lane;
    const bool listed = entry < list.num_blocks;
    const int block = listed ? __ldg(list.blocks + entry) : INT_MAX;
    const int before = listed && entry > 0 ? __ldg(list.blocks + entry - 1) : -1;
    bad |= listed && (block <= before || block > last);
    past += __popc(__ballot_sync(~0u, block < own));
    const bool is_near = block >= own && block <= last_own;
    near += __popc(__ballot_sync(~0u, is_near));
    if (is_near) nearest = min(nearest, block);
  }
  if (__any_sync(~0u, bad)) return false;
  const bool lists_first = __any_sync(~0u, nearest == own);
  tile.bits = nullptr;
  tile.num_blocks = past + near;
  tile.whole_keys = tile.past_keys = (past << lists.k_shift) + (near > 0 ? first & (size - 1) : 0);
  if (near == 0) {
    place_behind_all(tile);
  } else {
    const int most = size > kListedQueries ? kListedQueries : near << lists.k_shift;
    place_own(tile, k_len, lists_first ? first : last_own << lists.k_shift, most);
  }
  return true;
}

// False if what there is cannot be right. Key tiles that nobody sees are left out.
template <int kKeys>
__device__ __forceinline__ bool find_keys(const ForwardParams& params, const Sequence& seq, int lane,
                                          ListedTile& tile) {
  const KeyLists& lists = params.lists;
  const List list(lists, tile.batch, tile.kv_head, tile.place);
  tile.blocks = list.blocks;
  tile.bad = 0;
  if (list.bad) return false;
  const bool by_places = lists.row_pointers != nullptr;
  const bool found = lists.united != nullptr ? find_united(lists, list, seq.k_len, tile)
                     : by_places             ? find_own(lists, list, seq.k_len, lane, tile)
                                             : find_bits(lists, list, tile);
  if (!found) return false;
  int open = tile.whole_keys, end = tile.k_len;
  if (by_places) {
    // Of united rows one may not list what is at the queries' own places.
    if (lists.united == nullptr) open = max(open, min(tile.place + 1, tile.k_len));
    end = max(tile.past_keys, min(tile.place + tile.tokens, tile.k_len));
  }
  tile.open_begin = 0;
  tile.open_end = open / kKeys;
  tile.num_keys = ceil_div(end, kKeys);
  // There must be some for what is bad to be seen.
  if (tile.bad != 0) tile.num_keys = max(tile.num_keys, 1);
  return true;
}

// Which pairs of a key tile count: a bit for each of a thread's scores.
template <int kKeys>
struct SeenPairs {
  static_assert(kKeys % kBitsSide == 0);
  uint32_t words[kKeys / kBitsSide];

  // Of two rows that are united, whose queries see all of a block or nothing: a bit for each of the thread's.
  __device__ __forceinline__ void look_up_rows(const KeyLists& lists, const ListedTile& tile, int key,
                                               const int (&half)[kRowsPerThread]) {
    const int whole = tile.whole_keys >> lists.k_shift;
#pragma unroll
    for (int i = 0; i < kKeys / kBitsSide; ++i) {
      const int block = key * (kKeys / kBitsSide) + i;
      words[i] = block < whole ? ~0u : 0u;
      if (block < whole || block >= tile.num_blocks) continue;
      const int entry = __ldcg(tile.blocks + block);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        if (entry & (half[row] == 0 ? kSeenByUpper : kSeenByLower)) words[i] |= 1u << row;
      }
    }
  }

  __device__ __forceinline__ void look_up(const KeyLists& lists, const ListedTile& tile, int key,
                                          int warpgroup, int thread) {
    const int parts = lists.k_shift - kBitsShift;  // of a block, log2
    const int whole = tile.whole_keys >> lists.k_shift;
#pragma unroll
    for (int i = 0; i < kKeys / kBitsSide; ++i) {
      const int part = key * (kKeys / kBitsSide) + i, block = part >> parts;
      words[i] = block < whole ? ~0u : 0u;
      if (block < whole || block >= tile.num_blocks) continue;
      const int64_t side = int64_t{block - whole} << (lists.q_shift - kBitsShift);
      const int64_t place = ((side + warpgroup) << parts) + (part & ((1 << parts) - 1));
      words[i] = __ldg(tile.bits + place * kWarpgroupThreads + thread);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void mask_others(float (&rS)[kCount]) const {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if ((words[r / 32] & 1u << r % 32) == 0) rS[r] = -INFINITY;
    }
  }
  template <int kCount>
  __device__ __forceinline__ void mask_other_rows(float (&rS)[kCount]) const {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if ((words[r / 32] & 1u << FragmentPosition::row_of(r)) == 0) rS[r] = -INFINITY;
    }
  }
};

}  // namespace pallas_attn::attention::sm90
