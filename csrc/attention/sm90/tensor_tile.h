// How the copy engine sees arrays of heads, forward and backward.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/tensor_map.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90 {

using namespace pallas_attn::sm90;

// An array of `batch` times `tokens` tokens, in boxes of `rows` tokens of `box_heads` heads, 64 elements
// each.
inline TensorTile<4> tile_of(const char* name, const void* array, const Strides& strides, int dim, int heads,
                             int tokens, int batch, int box_heads, int rows) {
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); };
  const auto size = [](int extent) { return static_cast<uint64_t>(extent); };
  return {name,
          array,
          {size(dim), size(heads), size(tokens), size(batch)},
          {bytes(strides.head), bytes(strides.token), bytes(strides.batch)},
          {kPieceDims, static_cast<uint32_t>(box_heads), static_cast<uint32_t>(rows), 1}};
}

}  // namespace pallas_attn::attention::sm90
