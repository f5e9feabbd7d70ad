// One translation unit per element type, so that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include "blocksparse/params.h"
#include "common/status.h"

namespace pallas_attn::blocksparse::sm90 {

LaunchStatus launch_prefill_bfloat16(const PrefillParams& params, cudaStream_t stream);
LaunchStatus launch_prefill_float16(const PrefillParams& params, cudaStream_t stream);

}  // namespace pallas_attn::blocksparse::sm90
