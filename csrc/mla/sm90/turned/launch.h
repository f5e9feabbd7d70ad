// Host entry point of the Hopper kernel over tokens of 656 bytes.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90::turned {

// Queues the kernel of the smallest tile that holds a KV head's rows, else of 64; as launch_dense_decode.
LaunchStatus launch_decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90::turned
