// Merging the partial results of requests that were cut over several SM parts by a kernel of its own, where
// the decode kernel's CTAs do not do that themselves.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/merging.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// Queues the kernel behind the decode kernel of the same parameters; it may start before that one has ended
// (and then waits), so nothing may be queued between the two.
LaunchStatus launch_combine(const DecodeParams& params, int num_sms, cudaStream_t stream);

}  // namespace pallas_attn::mla
