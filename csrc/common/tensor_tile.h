// A tensor and the tiles in which the bulk tensor copy engine moves it: what a tensor map is made of, but for
// the element type, without CUDA's headers.
#pragma once

#include <cstdint>

namespace pallas_attn {

template <int kRank>
struct TensorTile {
  const char* name;  // for messages
  const void* base;
  // Innermost dimension first. strides_bytes[i] is the distance between neighbours in dimension i + 1.
  uint64_t extent[kRank];
  uint64_t strides_bytes[kRank - 1];
  uint32_t box[kRank];
};

}  // namespace pallas_attn
