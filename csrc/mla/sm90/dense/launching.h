// Steps of a launch that any decode kernel takes; included by the files under instantiations/ only.
#pragma once

#include "common/dependent_launch.h"
#include "common/multiprocessors.h"
#include "mla/combine/combine.h"
#include "mla/sm90/dense/launch_plan.h"
#include "ptx/cache.h"

namespace pallas_attn::mla::sm90 {

// Asked for every launch, because the answers are those of the current context and one process may use
// several.
template <typename Kernel>
LaunchStatus ask_device(Kernel kernel, const KernelShape& shape, DeviceFacts* facts) {
  const LaunchStatus status = count_multiprocessors(&facts->num_sms);
  if (!status.ok()) return status;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts->blocks_per_sm, kernel,
                                                                          shape.threads, shape.shared_bytes);
  return status_of(error, "asking how many CTAs of the decode kernel fit on a multiprocessor");
}

// What there is to know and to set before a launch can be planned.
template <typename Kernel>
LaunchStatus prepare(Kernel kernel, const DecodeParams& params, const KernelShape& shape,
                     DeviceFacts* facts) {
  if (reinterpret_cast<uintptr_t>(params.partial_out) % ptx::kLineBytes != 0) {
    return status_of(cudaErrorMisalignedAddress,
                     "looking for partial results that begin on a line of 128 bytes");
  }
  // Every time: the limit, too, belongs to the current context.
  const LaunchStatus status =
      status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
                "raising the decode kernel's shared memory limit");
  return status.ok() ? ask_device(kernel, shape, facts) : status;
}

// `launch(merging, blocks)` queues the kernel; behind it comes, where that is to be, the one that merges.
template <typename Launch>
LaunchStatus launch_and_merge(const DecodeParams& params, Merging merging, int num_sms, cudaStream_t stream,
                              Launch launch) {
  LaunchStatus status =
      launch(merging, merging == Merging::kInside ? Blocks::kCooperative : Blocks::kIndependent);
  if (merging == Merging::kInside && cooperation_refused(status)) {
    merging = Merging::kKernelFollows;
    status = launch(merging, Blocks::kIndependent);
  }
  if (!status.ok() || merging != Merging::kKernelFollows) return status;
  return launch_combine(params, num_sms, stream);
}

}  // namespace pallas_attn::mla::sm90
