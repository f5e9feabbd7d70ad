// Host side of the bulk tensor copy engine: building CUtensorMap objects.
//
// The encoder is a driver function. It is looked up at run time, so the library carries no dependency on
// libcuda and loads on machines without a driver.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/status.h"

namespace pallas_attn {

struct TensorMapSpec {
  CUtensorMapDataType dtype;
  const void* base;
  // Innermost dimension first. strides_bytes[i] is the distance between neighbours in dimension i + 1.
  uint64_t extent[3];
  uint64_t strides_bytes[2];
  uint32_t box[3];
};

// Three-dimensional tiles with the 128-byte swizzle; out-of-range elements read as zero.
LaunchStatus encode_tensor_map(const TensorMapSpec& spec, CUtensorMap* map);

}  // namespace pallas_attn
