#include "attention/prepare/lists.h"
#include "attention/prepare/order_lists.h"
#include "attention/prepare/unite.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_lists_kernel(const __grid_constant__ ForwardParams params) {
  ptx::allow_dependent_launch();
  __shared__ OrderScratch<kPrepareThreads> scratch;
  order_lists<kPrepareThreads>(params, scratch);
}

}  // namespace

LaunchStatus launch_prepare_lists(const ForwardParams& params, cudaStream_t stream) {
  if (params.lists.united != nullptr) {
    const int tiles = params.lists.heads * united_rows(params.lists);
    unite_kernel<<<ceil_div(tiles, kUniteWarps), kUniteWarps * 32, 0, stream>>>(params.lists);
    const LaunchStatus status = status_of(cudaGetLastError(), "launching the kernel that unites rows");
    if (!status.ok()) return status;
  }
  prepare_lists_kernel<<<ordering_ctas(params), kPrepareThreads, 0, stream>>>(params);
  return status_of(cudaGetLastError(), "launching the prepare kernel of lists");
}

}  // namespace pallas_attn::attention
