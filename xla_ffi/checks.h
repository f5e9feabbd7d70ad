// Checks of a handler's arguments, worded like those of the Python layer: one line that names function,
// argument, what was expected and what came.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/status.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {

// What kernels count with.
constexpr int64_t kMaxInt = std::numeric_limits<int>::max();

class ArgumentChecker {
 public:
  explicit ArgumentChecker(const char* function) : function_(function) {}

  // A dimension of -1 may have any size. The first failure stays.
  void array(const char* argument, xla::ffi::AnyBuffer buffer, const std::vector<int64_t>& shape,
             const std::vector<xla::ffi::DataType>& dtypes);
  void require(bool condition, const char* argument, const std::string& expected, const std::string& got);
  // `what` is counted, with a space before it, or nothing.
  void between(const char* argument, const char* what, int64_t least, int64_t most, int64_t got);

  bool ok() const { return message_.empty(); }
  xla::ffi::Error error() const { return xla::ffi::Error::InvalidArgument(message_); }

 private:
  const char* function_;
  std::string message_;
};

xla::ffi::Error to_error(const char* function, const LaunchStatus& status);

}  // namespace pallas_attn
