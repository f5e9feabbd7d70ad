#include "attention/sm90/backward/prepare/kernel.h"
#include "common/dependent_launch.h"

namespace pallas_attn::attention::sm90::backward {
namespace {

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(BackwardParams params, Tiling tiling) {
  __shared__ PrepareScratch scratch;
  prepare(params, tiling, scratch);
}

}  // namespace

LaunchStatus launch_prepare(const BackwardParams& params, const Tiling& tiling, cudaStream_t stream) {
  const int more = tiling.queries > 0 ? 1 : params.ordered ? kZeroingBlocks : 0;
  return launch_dependent(prepare_kernel, dim3(1 + more), kPrepareThreads, 0, stream, Blocks::kIndependent,
                          "launching what orders the backward kernel's tiles", params, tiling);
}

}  // namespace pallas_attn::attention::sm90::backward
