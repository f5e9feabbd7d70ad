// From sums to gradients of queries.
#pragma once

#include <cuda_runtime.h>

#include "attention/backward_params.h"
#include "common/status.h"

namespace pallas_attn::attention::sm90::backward {

// `dim` columns of a row of sums are a query's gradient.
LaunchStatus launch_finish(const BackwardParams& params, int dim, cudaStream_t stream);

}  // namespace pallas_attn::attention::sm90::backward
