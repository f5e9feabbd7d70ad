// What a launch reports back: CUDA's own error plus the step that raised it, so that the caller (an FFI
// handler, a test program) can word its message without this tree knowing who calls.
#pragma once

#include <cuda_runtime.h>

namespace pallas_attn {

struct LaunchStatus {
  cudaError_t error = cudaSuccess;
  const char* step = "";

  bool ok() const { return error == cudaSuccess; }
};

}  // namespace pallas_attn
