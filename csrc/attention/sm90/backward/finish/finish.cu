#include "attention/sm90/backward/finish/kernel.h"
#include "common/dependent_launch.h"

namespace pallas_attn::attention::sm90::backward {
namespace {

template <typename Element>
__global__ void __launch_bounds__(kFinishWarps * 32) finish_kernel(BackwardParams params, int dim) {
  finish<Element>(params, dim);
}

}  // namespace

LaunchStatus launch_finish(const BackwardParams& params, int dim, cudaStream_t stream) {
  const int64_t units = int64_t{params.batch} * params.num_heads * ceil_div(params.q_len, kFinishRows);
  const auto kernel =
      params.element == ElementType::kBfloat16 ? finish_kernel<__nv_bfloat16> : finish_kernel<__half>;
  return launch_dependent(kernel, dim3(static_cast<unsigned>((units + kFinishWarps - 1) / kFinishWarps)),
                          kFinishWarps * 32, 0, stream, Blocks::kIndependent,
                          "launching what finishes gradients of queries", params, dim);
}

}  // namespace pallas_attn::attention::sm90::backward
