// A translation unit for each shape and element type, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
LaunchStatus launch_bfloat16(const BackwardParams& params, cudaStream_t stream);
template <typename Shape>
LaunchStatus launch_float16(const BackwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
