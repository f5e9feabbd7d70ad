// Whose tiles are taken side by side.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/prepare/prepare.h"
#include "common/host_device.h"
#include "common/math.h"

namespace pallas_attn::attention {

// All side by side balance best; some at a time read keys from the L2, where they are work enough for the
// last of them to be begun in time: on all CTAs twice as long as the longest tile. Of `all`, each of which is
// `work` key tiles and reads so many keys several times: a divisor.
PALLAS_ATTN_HOST_DEVICE inline int together_of(const ForwardParams& params, int all, int64_t keys,
                                               int64_t work, int longest, int ctas) {
  const int64_t enough = int64_t{2} * longest * ctas;
  int together = all;
  while (together > 1 && together * keys > params.keys_in_l2) {
    const int fewer = together % 2 == 0 ? together / 2 : 1;
    if (work * fewer < enough) break;
    together = fewer;
  }
  return together;
}

// Equal sequences have the same tiles, nothing is sorted, and it is pairs of a sequence and a KV head that
// are taken side by side. Windows are in the GPU's memory: work is as little as under a causal mask.
inline Counters counters_of_equal(const ForwardParams& params, const Tiling& tiling) {
  const int tiles = ceil_div(params.q_len, tiling.tokens), longest = ceil_div(params.kv_len, tiling.keys);
  const int64_t work = int64_t{tiles} * (longest + 1) / 2;
  const int64_t keys = tiles > 1 ? params.kv_len : 0;
  const int pairs = params.num_seqs * params.num_kv_heads;
  return {0, tiles * params.num_seqs, 0, together_of(params, pairs, keys, work, longest, tiling.ctas)};
}

}  // namespace pallas_attn::attention
