// Loading what nobody writes while the kernel runs, on the device through the cache for such data.
#pragma once

#include "common/host_device.h"

namespace pallas_attn {

PALLAS_ATTN_HOST_DEVICE inline int load_constant(const int* from) {
#ifdef __CUDA_ARCH__
  return __ldg(from);
#else
  return *from;
#endif
}

}  // namespace pallas_attn
