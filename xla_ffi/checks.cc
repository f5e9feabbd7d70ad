#include "checks.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;

std::string describe(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += shape[i] < 0 ? "any" : std::to_string(shape[i]);
  }
  return text + "]";
}

std::string name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U8:
      return "uint8";
    default:
      return "another dtype (" + std::to_string(static_cast<int>(dtype)) + ")";
  }
}

}  // namespace

void ArgumentChecker::require(bool condition, const char* argument, const std::string& expected,
                              const std::string& got) {
  if (condition || !message_.empty()) return;
  message_ = std::string(function_) + ": argument '" + argument + "': expected " + expected + ", got " + got;
}

void ArgumentChecker::between(const char* argument, const char* what, int64_t least, int64_t most,
                              int64_t got) {
  require(got >= least && got <= most, argument,
          "between " + std::to_string(least) + " and " + std::to_string(most) + what, std::to_string(got));
}

void ArgumentChecker::array(const char* argument, ffi::AnyBuffer buffer, const std::vector<int64_t>& shape,
                            const std::vector<ffi::DataType>& dtypes) {
  bool known_dtype = false;
  std::string expected = "dtype ";
  for (size_t i = 0; i < dtypes.size(); ++i) {
    known_dtype |= buffer.element_type() == dtypes[i];
    expected += (i > 0 ? " or " : "") + name(dtypes[i]);
  }
  require(known_dtype, argument, expected, name(buffer.element_type()));

  const auto dimensions = buffer.dimensions();
  bool fits = dimensions.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || shape[i] == dimensions[i];
  require(fits, argument, "shape " + describe(shape), describe({dimensions.begin(), dimensions.end()}));
}

xla::ffi::Error to_error(const char* function, const LaunchStatus& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(function) + ": " + status.message);
}

}  // namespace pallas_attn
