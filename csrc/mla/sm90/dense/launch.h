// Host entry points of the dense Hopper kernel.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// Queues the kernel on `stream`. It announces its dependents early: what follows must wait for it by itself
// (see combine.h) or be launched without the programmatic attribute.
LaunchStatus launch_dense_decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla::sm90
