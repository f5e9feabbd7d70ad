#include "attention/prepare/kernel.h"
#include "attention/prepare/prepare.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

__global__ void __launch_bounds__(kThreads, 1)
    prepare_kernel(const __grid_constant__ ForwardParams params, const Tiling tiling) {
  ptx::allow_dependent_launch();
  extern __shared__ char shared_memory[];
  prepare(params, tiling, *reinterpret_cast<Scratch*>(shared_memory));
}

}  // namespace

LaunchStatus launch_prepare(const ForwardParams& params, const Tiling& tiling, cudaStream_t stream) {
  const int seqs = params.first_tile != nullptr ? 0 : params.num_seqs + padding_seqs(params) + 1;
  const size_t bytes = sizeof(Scratch) + seqs * sizeof(int);
  if (bytes > 48 * 1024) {
    const LaunchStatus status =
        status_of(cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)),
                  "raising the prepare kernel's shared memory limit");
    if (!status.ok()) return status;
  }
  prepare_kernel<<<1, kThreads, bytes, stream>>>(params, tiling);
  return status_of(cudaGetLastError(), "launching the prepare kernel");
}

}  // namespace pallas_attn::attention
