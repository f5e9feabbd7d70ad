// Host entry points of the dense Hopper kernel.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// Queues the kernel, which writes outputs and log-sum-exps, on `stream`; behind it another one that merges
// what was cut where the grid is too large for that to happen inside.
LaunchStatus launch_dense_decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90
