// Launching a kernel programmatically behind whatever the stream runs before it: it may start before that has
// ended, and waits for it by itself (ptx::wait_for_previous_kernel). Cooperative: all blocks of the grid,
// which must fit on the device together, are sure to run at the same time and may wait for each other. In
// pairs: clusters of two neighbours along x.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"

namespace pallas_attn {

enum class Blocks { kIndependent, kCooperative, kInPairs };

template <typename... Parameters>
LaunchStatus launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
                              cudaStream_t stream, Blocks blocks, const char* step,
                              const Parameters&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  if (blocks == Blocks::kCooperative) {
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
  } else {
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {2, 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = blocks == Blocks::kIndependent ? 1 : 2;
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...), step);
}

// Whether the driver will not run this grid's blocks together, as with some of the multiprocessors reserved
// for others (MPS, green contexts), though it would run them one after the other.
inline bool cooperation_refused(const LaunchStatus& status) {
  return status.error == cudaErrorCooperativeLaunchTooLarge || status.error == cudaErrorNotSupported;
}

}  // namespace pallas_attn
