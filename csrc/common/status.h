// What a launch reports back: CUDA's error, and the step that failed and why in words, so that the caller (an
// FFI handler, a test program) can say so without this tree knowing who calls.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace pallas_attn {

struct LaunchStatus {
  cudaError_t error = cudaSuccess;
  std::string message;

  bool ok() const { return error == cudaSuccess; }
};

// The status of a call that gave `error`. Takes an error off the thread's record, where a later
// cudaGetLastError would find it and blame another call.
inline LaunchStatus status_of(cudaError_t error, const std::string& step) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  return {error, step + ": " + cudaGetErrorString(error)};
}

}  // namespace pallas_attn
