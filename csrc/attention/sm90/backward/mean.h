// The mean of the first keys that are seen, which stands for what keys have in common.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/walk.h"
#include "common/element_traits.h"

namespace pallas_attn::attention::sm90::backward {

constexpr int kSample = 16;  // places of keys that are looked at
constexpr int kMeanColumns = 4;

// Of columns `column` to column + 3 of keys among `keys` that are the sequence's own; `key` is the place of
// its first. Columns from head_dim on are 0.
template <typename Element, typename Own>
__device__ __forceinline__ float4 mean_of_keys(const BackwardParams& params, int batch, int kv_head,
                                               const Span& keys, int column, Own own, int key) {
  const int end = min(keys.begin + kSample, keys.end);
  const auto* from = static_cast<const uint16_t*>(params.key) + batch * params.key_strides.batch +
                     kv_head * params.key_strides.head + column;
  float4 sum = {};
  float some = 0.0f;
#pragma unroll 4
  for (int i = keys.begin; i < end; ++i) {
    if (!own(i)) continue;
    some += 1.0f;
    if (column >= params.head_dim) continue;
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(from + (key + i) * params.key_strides.token));
    const float2 left = ElementTraits<Element>::unpack(words.x);
    const float2 right = ElementTraits<Element>::unpack(words.y);
    sum.x += left.x, sum.y += left.y, sum.z += right.x, sum.w += right.y;
  }
  const float share = some > 0.0f ? 1.0f / some : 0.0f;
  return {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
}

}  // namespace pallas_attn::attention::sm90::backward
