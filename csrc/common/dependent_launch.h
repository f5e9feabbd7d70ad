// Launching a kernel programmatically behind whatever the stream runs before it: it may start before that has
// ended, and waits for it by itself (ptx::wait_for_previous_kernel).
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"

namespace pallas_attn {

template <typename... Parameters>
LaunchStatus launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                              cudaStream_t stream, const char* step, const Parameters&... arguments) {
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return {cudaLaunchKernelEx(&config, kernel, arguments...), step};
}

}  // namespace pallas_attn
