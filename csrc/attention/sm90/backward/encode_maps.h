// How the copy engine sees what gradients are made of.
#pragma once

#include "attention/backward_params.h"
#include "attention/sm90/backward/maps.h"
#include "attention/sm90/tensor_tile.h"
#include "common/element_traits.h"
#include "common/tensor_map.h"

namespace pallas_attn::attention::sm90::backward {

// In boxes of so many queries, and of so many keys.
template <typename Element>
LaunchStatus encode_maps(const BackwardParams& params, int queries, int keys, Maps* maps) {
  const auto encode = [](const TensorTile<4>& tile, CUtensorMap* map) {
    return encode_tensor_map(tile, ElementTraits<Element>::kTensorMapType, map);
  };
  LaunchStatus status = encode(tile_of("query", params.query, params.query_strides, params.head_dim,
                                       params.num_heads, params.q_len, params.batch, 1, queries),
                               &maps->query);
  if (status.ok()) {
    status = encode(tile_of("d_out", params.d_out, params.out_strides, params.value_dim, params.num_heads,
                            params.q_len, params.batch, 1, queries),
                    &maps->d_out);
  }
  if (status.ok()) {
    status = encode(tile_of("key", params.key, params.key_strides, params.head_dim, params.num_kv_heads,
                            params.kv_len, params.batch, 1, keys),
                    &maps->key);
  }
  if (status.ok()) {
    status = encode(tile_of("value", params.value, params.value_strides, params.value_dim,
                            params.num_kv_heads, params.kv_len, params.batch, 1, keys),
                    &maps->value);
  }
  return status;
}

}  // namespace pallas_attn::attention::sm90::backward
