// From the lengths of a batch to the work items of the forward kernel where keys are named by lists.
#pragma once

#include <cuda_runtime.h>

#include "attention/params.h"
#include "common/status.h"

namespace pallas_attn::attention {

LaunchStatus launch_prepare_lists(const ForwardParams& params, cudaStream_t stream);

}  // namespace pallas_attn::attention
