#include "attention/prepare/kernel.h"
#include "attention/prepare/prepare.h"
#include "common/dependent_launch.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

__global__ void __launch_bounds__(kThreads, 1)
    prepare_kernel(const __grid_constant__ ForwardParams params, const Tiling tiling) {
  // In this order: the forward kernel asks for the scale before it waits for this one.
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  extern __shared__ char shared_memory[];
  prepare(params, tiling, *reinterpret_cast<Scratch*>(shared_memory));
}

__global__ void set_counters_kernel(Counters* counters, Counters to) {
  ptx::wait_for_previous_kernel();
  ptx::allow_dependent_launch();
  *counters = to;
}

}  // namespace

LaunchStatus launch_prepare(const ForwardParams& params, const Tiling& tiling, cudaStream_t stream) {
  if (has_equal_sequences(params)) {
    return launch_dependent(set_counters_kernel, dim3(1), 1, 0, stream, Blocks::kIndependent,
                            "launching the kernel that sets counters", params.counters, params.equal);
  }
  const int seqs = params.first_tile != nullptr ? 0 : params.num_seqs + padding_seqs(params) + 1;
  const size_t bytes = sizeof(Scratch) + seqs * sizeof(int);
  if (bytes > 48 * 1024) {
    const LaunchStatus status =
        status_of(cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)),
                  "raising the prepare kernel's shared memory limit");
    if (!status.ok()) return status;
  }
  return launch_dependent(prepare_kernel, dim3(1), kThreads, static_cast<int>(bytes), stream,
                          Blocks::kIndependent, "launching the prepare kernel", params, tiling);
}

}  // namespace pallas_attn::attention
