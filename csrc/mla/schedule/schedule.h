// Deals the pages of a batch out to parts, on the device.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// Fills `schedule` and `num_splits`; at most kMostRequests and kMostParts of dealing.h.
LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream);

}  // namespace pallas_attn::mla
