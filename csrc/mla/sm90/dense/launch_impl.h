// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "common/tensor_map.h"
#include "mla/combine/combine.h"
#include "mla/sm90/dense/smem_plan.h"
#include "mla/sm90/dense/launch_plan.h"

namespace pallas_attn::mla::sm90 {

// Asked for every launch, because the answers are those of the current context and one process may use
// several.
template <typename Kernel>
LaunchStatus ask_device(Kernel kernel, const KernelShape& shape, DeviceFacts* facts) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&facts->num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return status_of(error, "asking for the number of multiprocessors");
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts->blocks_per_sm, kernel, shape.threads,
                                                        shape.shared_bytes);
  return status_of(error, "asking how many CTAs of the decode kernel fit on a multiprocessor");
}

// One kernel over dense pages.
struct Instance {
  void (*kernel)(DecodeParams, CUtensorMap, CUtensorMap, CUtensorMap, Merging);
  CUtensorMapDataType element;  // of query and output
  CUtensorMapDataType copied;   // what the copy engine takes the cache for
  int most_cut_requests;        // that CTAs can merge by themselves
};

inline LaunchStatus launch_planned(const Instance& instance, const DecodeParams& params,
                                   const LaunchPlan& plan, int num_sms, cudaStream_t stream) {
  CUtensorMap query_map, cache_map, out_map;
  LaunchStatus status = encode_tensor_map(plan.query, instance.element, &query_map);
  if (status.ok()) status = encode_tensor_map(plan.latent_cache, instance.copied, &cache_map);
  if (status.ok()) status = encode_tensor_map(plan.out, instance.element, &out_map);
  if (!status.ok()) return status;

  const dim3 grid(plan.grid.row_tiles, plan.grid.parts, plan.grid.kv_heads);
  const auto launch = [&](Merging merging) {
    // The launch and the set-up of the barriers overlap the end of the kernel before.
    const Blocks blocks = merging == Merging::kInside ? Blocks::kCooperative : Blocks::kIndependent;
    return launch_dependent(instance.kernel, grid, plan.threads, plan.shared_bytes, stream,
                            blocks, "launching the decode kernel", params, query_map, cache_map, out_map,
                            merging);
  };
  Merging merging = plan.merging;
  status = launch(merging);
  if (merging == Merging::kInside && cooperation_refused(status)) {
    merging = Merging::kKernelFollows;
    status = launch(merging);
  }
  if (!status.ok() || merging != Merging::kKernelFollows) return status;
  return launch_combine(params, num_sms, stream);
}

inline LaunchStatus launch_instance(const Instance& instance, const DecodeParams& params,
                                    cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(params.partial_out) % ptx::kLineBytes != 0) {
    return status_of(cudaErrorMisalignedAddress,
                     "looking for partial results that begin on a line of 128 bytes");
  }
  const KernelShape shape = {kTileRows, kWarpRows,        kPieceDims,
                             kThreads,  sizeof(SmemPlan), instance.most_cut_requests};
  // Every time: the limit, too, belongs to the current context.
  LaunchStatus status = status_of(
      cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
      "raising the decode kernel's shared memory limit");
  DeviceFacts facts = {};
  if (status.ok()) status = ask_device(instance.kernel, shape, &facts);
  if (!status.ok()) return status;
  return launch_planned(instance, params, plan_launch(params, shape, facts), facts.num_sms, stream);
}

}  // namespace pallas_attn::mla::sm90
