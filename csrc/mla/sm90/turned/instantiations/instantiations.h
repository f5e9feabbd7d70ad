// One translation unit per tile of rows, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90::turned {

LaunchStatus launch_rows_16(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_rows_32(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_rows_64(const DecodeParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90::turned
