// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "common/element_traits.h"
#include "common/tensor_map.h"
#include "mla/sm90/dense/launching.h"
#include "mla/sm90/dense/smem_plan.h"

namespace pallas_attn::mla::sm90 {

// One kernel over dense pages.
struct Instance {
  void (*kernel)(DecodeParams, CUtensorMap, CUtensorMap, CUtensorMap, Merging);
  CUtensorMapDataType element;
};

inline LaunchStatus launch_instance(const Instance& instance, const DecodeParams& params,
                                    cudaStream_t stream) {
  const KernelShape shape = {kTileRows, kWarpRows,        kPieceDims,
                             kThreads,  sizeof(SmemPlan), CutList::kCapacity};
  DeviceFacts facts = {};
  LaunchStatus status = prepare(instance.kernel, params, shape, &facts);
  if (!status.ok()) return status;

  const LaunchPlan plan = plan_launch(params, shape, facts);
  CUtensorMap query_map, cache_map, out_map;
  status = encode_tensor_map(plan.query, instance.element, &query_map);
  if (status.ok()) status = encode_tensor_map(plan.latent_cache, instance.element, &cache_map);
  if (status.ok()) status = encode_tensor_map(plan.out, instance.element, &out_map);
  if (!status.ok()) return status;

  const dim3 grid(plan.grid.row_tiles, plan.grid.parts, plan.grid.kv_heads);
  // The launch and the set-up of the barriers overlap the end of the kernel before.
  return launch_and_merge(params, plan.merging, facts.num_sms, stream, [&](Merging merging, Blocks blocks) {
    return launch_dependent(instance.kernel, grid, plan.threads, plan.shared_bytes, stream, blocks,
                            "launching the decode kernel", params, query_map, cache_map, out_map, merging);
  });
}

}  // namespace pallas_attn::mla::sm90
