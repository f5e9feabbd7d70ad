// One translation unit per element type, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_dense_decode_bfloat16(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_dense_decode_float16(const DecodeParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90
