// One translation unit per kind of row, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/sparse_params.h"

namespace pallas_attn::mla::sm90 {

LaunchStatus launch_sparse_bfloat16(const SparseParams& params, cudaStream_t stream);
LaunchStatus launch_sparse_float16(const SparseParams& params, cudaStream_t stream);
LaunchStatus launch_sparse_fp8(const SparseParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90
