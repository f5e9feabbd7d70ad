// How the copy engine sees heads of whole pieces, so that a box has all pieces of neighbouring tokens, eight
// tokens of one piece after eight of the next, as they lie in a woven KeyTile.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/tensor_tile.h"
#include "common/host_device.h"

namespace pallas_attn::attention::sm90 {

// A map has five dimensions, and pages ask for six: element, token of eight, piece, eight, head, page. So
// heads are further pieces where a token's lie side by side, and else further eights. What a head's number
// counts:
struct WovenHeads {
  int pieces, eights;

  PALLAS_ATTN_HOST_DEVICE WovenHeads(const Strides& strides, int dim, int page_size)
      : pieces(strides.head == dim ? dim / kPieceDims : 0), eights(pieces > 0 ? 0 : page_size / 8) {}
};

// Pages of a multiple of eight tokens, in boxes of `rows`.
inline TensorTile<5> woven_pages(const char* name, const void* array, const Strides& strides, int dim,
                                 int heads, int page_size, int num_pages, int rows) {
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); };
  const WovenHeads steps(strides, dim, page_size);
  const uint64_t pieces = dim / kPieceDims + steps.pieces * (heads - 1);
  const uint64_t eights = page_size / 8 + steps.eights * (heads - 1);
  return {name,
          array,
          {kPieceDims, 8, pieces, eights, static_cast<uint64_t>(num_pages)},
          {bytes(strides.token), kRowBytes, bytes(8 * strides.token), bytes(strides.batch)},
          {kPieceDims, 8, static_cast<uint32_t>(dim / kPieceDims), static_cast<uint32_t>(rows / 8), 1}};
}

// Rows, which begin anywhere, in boxes of eight.
inline TensorTile<5> woven_rows(const char* name, const void* array, const Strides& strides, int dim,
                                int heads, int tokens, int batch) {
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); };
  const auto size = [](int extent) { return static_cast<uint64_t>(extent); };
  return {name,
          array,
          {kPieceDims, size(tokens), size(dim / kPieceDims), size(heads), size(batch)},
          {bytes(strides.token), kRowBytes, bytes(strides.head), bytes(strides.batch)},
          {kPieceDims, 8, static_cast<uint32_t>(dim / kPieceDims), 1, 1}};
}

}  // namespace pallas_attn::attention::sm90
