// Host entry points of the Hopper kernels over tokens of 656 bytes.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/sparse_params.h"

namespace pallas_attn::mla::sm90::transposed {

// Queues the kernel of the smallest tile that holds a KV head's rows, else of 64; as launch_dense_decode.
LaunchStatus launch_decode(const DecodeParams& params, cudaStream_t stream);

// The same over chosen tokens; as sm90::launch_sparse, which has it for kFp8 rows unless the largest logits
// are asked for: here nobody knows them.
LaunchStatus launch_sparse(const SparseParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90::transposed
