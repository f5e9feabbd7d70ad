// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "mla/sm90/dense/launching.h"
#include "mla/sm90/turned/kernel.h"

namespace pallas_attn::mla::sm90::turned {

template <int kRows>
LaunchStatus launch_instance(const DecodeParams& params, cudaStream_t stream) {
  constexpr KernelShape kShape = {
      kTileRows, kWarpRows, kPieceDims, kThreads, sizeof(TurnedPlan<kRows>), CutList::kCapacity};
  const auto kernel = turned_decode_kernel<kRows>;
  DeviceFacts facts = {};
  LaunchStatus status = prepare(kernel, params, kShape, &facts);
  if (!status.ok()) return status;

  const LaunchPlan plan = plan_launch(params, kShape, facts);
  const dim3 grid(plan.grid.row_tiles, plan.grid.parts, plan.grid.kv_heads);
  return launch_and_merge(params, plan.merging, facts.num_sms, stream, [&](Merging merging, Blocks blocks) {
    return launch_dependent(kernel, grid, plan.threads, plan.shared_bytes, stream, blocks,
                            "launching the decode kernel over bytes", params, merging);
  });
}

}  // namespace pallas_attn::mla::sm90::turned
