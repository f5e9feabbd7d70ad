// One translation unit per tile of rows, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/sparse_params.h"

namespace pallas_attn::mla::sm90::transposed {

LaunchStatus launch_rows_16(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_rows_32(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_rows_64(const DecodeParams& params, cudaStream_t stream);
LaunchStatus launch_chosen_16(const SparseParams& params, cudaStream_t stream);
LaunchStatus launch_chosen_32(const SparseParams& params, cudaStream_t stream);
LaunchStatus launch_chosen_64(const SparseParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90::transposed
