// What the handlers of attention's forward and backward pass unpack alike: arrays of heads, and optional
// ones.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {

constexpr int64_t kMostTokens = int64_t{1} << 30;

// An array of heads, [batch, tokens, heads, dim] or [batch, heads, tokens, dim], or the same without `dim`.
struct Heads {
  int64_t batch, tokens, heads, dim;
  bool heads_first;

  static Heads of(xla::ffi::AnyBuffer buffer, bool heads_first) {
    const auto dims = buffer.dimensions();
    return {dims[0], dims[heads_first ? 2 : 1], dims[heads_first ? 1 : 2], dims[3], heads_first};
  }
  std::vector<int64_t> shape() const {
    std::vector<int64_t> sizes = {batch, heads_first ? heads : tokens, heads_first ? tokens : heads};
    if (dim > 0) sizes.push_back(dim);
    return sizes;
  }
  attention::Strides strides() const {
    const int64_t element = dim > 0 ? dim : 1;
    if (heads_first) return {tokens * element, element, heads * tokens * element};
    return {element, heads * element, tokens * heads * element};
  }
};

template <typename T>
const T* optional(xla::ffi::AnyBuffer buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

}  // namespace pallas_attn
