// How many multiprocessors the current device has.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"

namespace pallas_attn {

inline LaunchStatus count_multiprocessors(int* count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return status_of(error, "asking for the number of multiprocessors");
}

}  // namespace pallas_attn
