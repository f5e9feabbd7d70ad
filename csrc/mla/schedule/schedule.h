// Shares the pages of a batch out over SM parts.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// Fills `schedule` and `num_splits`. Needs 4 bytes of shared memory a request.
LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla
