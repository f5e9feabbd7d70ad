// A translation unit for each shape and element type, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape>
LaunchStatus launch_bfloat16(const ForwardParams& params, cudaStream_t stream);
template <typename Shape>
LaunchStatus launch_float16(const ForwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90
