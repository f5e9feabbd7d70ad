// What a tile's list says of its keys: found by the scout, a warp.
#pragma once

#include <climits>
#include <cstdint>

#include "attention/lists.h"
#include "attention/params.h"
#include "attention/sm90/forward/smem_plan.h"
#include "common/math.h"

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
  tile.k_len = list.num_blocks << lists.k_shift;
  tile.seen_end = INT_MAX;  // the others read as zero
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
  tile.whole_keys = (past << lists.k_shift) + (near > 0 ? first & (size - 1) : 0);
  tile.k_len = tile.seen_end = tile.whole_keys;
  if (near == 0) {
    tile.place = tile.whole_keys;  // behind all keys
    return true;
  }
  const int first_key = lists_first ? first : last_own << lists.k_shift;
  const int most = size > kListedQueries ? kListedQueries : near << lists.k_shift;
  tile.place += tile.whole_keys - first_key;
  tile.k_len = tile.seen_end = tile.whole_keys + min(most, max(k_len - first_key, 0));
  return true;
}

// False if what there is cannot be right. Key tiles that nobody sees are left out.
template <int kKeys>
__device__ __forceinline__ bool find_keys(const ForwardParams& params, const Sequence& seq, int lane,
                                          ListedTile& tile) {
  const KeyLists& lists = params.lists;
  const List list(lists, tile.batch, tile.kv_head, tile.place);
  tile.blocks = list.blocks;
  if (list.bad) return false;
  const bool by_places = lists.row_pointers != nullptr;
  if (by_places ? !find_own(lists, list, seq.k_len, lane, tile) : !find_bits(lists, list, tile)) return false;
  int open = tile.whole_keys, end = tile.k_len;
  if (by_places) {
    open = max(open, min(tile.place + 1, tile.k_len));
    end = max(tile.whole_keys, min(tile.place + tile.tokens, tile.k_len));
  }
  tile.open_begin = 0;
  tile.open_end = open / kKeys;
  tile.num_keys = ceil_div(end, kKeys);
  return true;
}

// Which pairs of a key tile count: a bit for each of a thread's scores.
template <int kKeys>
struct SeenPairs {
  static_assert(kKeys % kBitsSide == 0);
  uint32_t words[kKeys / kBitsSide];

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
};

}  // namespace pallas_attn::attention::sm90
