// Makes the GPU that XLA runs a call on the current one of its thread for as long as the handler runs:
// launches and questions about the device go to the current one, and one thread may serve several.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"
#include "common/status.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    status_ = status_of(cudaGetDevice(&before_), "asking for the current device");
    if (!status_.ok() || before_ == device) return;
    status_ =
        status_of(cudaSetDevice(device), "making device " + std::to_string(device) + " the current one");
    changed_ = status_.ok();
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  const LaunchStatus& status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  LaunchStatus status_;
};

// How a handler ends: launch(params, stream) on the GPU that XLA runs it on.
template <typename Launch, typename Params>
xla::ffi::Error launched(const char* function, int32_t device, cudaStream_t stream, Launch launch,
                         const Params& params) {
  const DeviceGuard guard(device);
  return to_error(function, guard.status().ok() ? launch(params, stream) : guard.status());
}

}  // namespace pallas_attn
