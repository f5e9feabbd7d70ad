// Host entry point of the sparse Hopper kernels.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/sparse_params.h"

namespace pallas_attn::mla::sm90 {

// Queues the kernel on `stream`, which writes outputs, log-sum-exps and, where asked for, the largest logits;
// behind it another one that merges what was cut where that does not happen inside.
LaunchStatus launch_sparse(const SparseParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90
