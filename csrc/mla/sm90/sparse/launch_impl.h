// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "common/element_traits.h"
#include "common/tensor_map.h"
#include "mla/sm90/dense/launching.h"
#include "mla/sm90/sparse/kernel.h"

namespace pallas_attn::mla::sm90 {

template <typename Element, typename Feeder>
LaunchStatus launch_sparse_instance(const SparseParams& params, cudaStream_t stream) {
  constexpr KernelShape kShape = {kTileRows,          kWarpRows,
                                  kPieceDims,         kThreads,
                                  sizeof(SparsePlan), Feeder::Ids::Budget::kMerges ? CutList::kCapacity : 0};
  constexpr CUtensorMapDataType kDtype = ElementTraits<Element>::kTensorMapType;
  const auto kernel = sparse_kernel<Element, Feeder>;
  DeviceFacts facts = {};
  LaunchStatus status = prepare(kernel, params, kShape, &facts);
  if (!status.ok()) return status;

  const LaunchPlan plan = plan_launch(params, kShape, facts);
  CUtensorMap query_map, out_map;
  status = encode_tensor_map(plan.query, kDtype, &query_map);
  if (status.ok()) status = encode_tensor_map(plan.out, kDtype, &out_map);
  if (!status.ok()) return status;

  // Two tiles of rows that share what they gather.
  constexpr bool kInPairs = Feeder::Ids::kCtas == 2;
  const dim3 grid(plan.grid.row_tiles, plan.grid.parts);
  const Merging merging = params.nothing_is_cut ? Merging::kNothingIsCut : plan.merging;
  return launch_and_merge(params, merging, facts.num_sms, stream, [&](Merging way, Blocks blocks) {
    return launch_dependent(kernel, grid, plan.threads, plan.shared_bytes, stream,
                            kInPairs ? Blocks::kInPairs : blocks, "launching the sparse kernel", params,
                            query_map, out_map, way);
  });
}

}  // namespace pallas_attn::mla::sm90
