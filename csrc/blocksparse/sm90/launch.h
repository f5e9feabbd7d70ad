// Host entry point of block-sparse prefill on Hopper.
#pragma once

#include <cuda_runtime.h>

#include "blocksparse/params.h"
#include "common/status.h"

namespace pallas_attn::blocksparse::sm90 {

// Queues the kernel, and before it what zeroes its counter.
LaunchStatus launch_prefill(const PrefillParams& params, cudaStream_t stream);

}  // namespace pallas_attn::blocksparse::sm90
