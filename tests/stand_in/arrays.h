// Arrays of a call: from standard input, or to standard output.
#pragma once

#include "device.h"

namespace stand_in {

// On a boundary of device memory's allocations.
template <typename T>
struct alignas(256) Line {
  T v[256 / sizeof(T)];
};
template <typename T>
class Array {
 public:
  explicit Array(size_t count) : lines_(count * sizeof(T) / 256 + 1), count_(count) {
    std::memset(lines_.data(), 0xFF, lines_.size() * 256);
  }
  T* data() { return lines_[0].v; }
  Array&& read() && {
    if (std::fread(data(), sizeof(T), count_, stdin) != count_) fail("too little input");
    return std::move(*this);
  }
  size_t size() const { return count_; }
  void write() { std::fwrite(data(), sizeof(T), count_, stdout); }

 private:
  std::vector<Line<T>> lines_;
  size_t count_;
};

}  // namespace stand_in
