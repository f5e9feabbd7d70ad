// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "mla/sm90/dense/launching.h"
#include "mla/sm90/transposed/kernel.h"

namespace pallas_attn::mla::sm90::transposed {

template <typename Tokens, int kRows>
LaunchStatus launch_instance(const typename Tokens::Params& params, cudaStream_t stream) {
  constexpr size_t kShared = sizeof(typename Tokens::template Plan<kRows>);
  constexpr KernelShape kShape = {kTileRows, kWarpRows, kPieceDims, kThreads, kShared, CutList::kCapacity};
  const auto kernel = transposed_decode_kernel<Tokens, kRows>;
  DeviceFacts facts = {};
  LaunchStatus status = prepare(kernel, params, kShape, &facts);
  if (!status.ok()) return status;

  const LaunchPlan plan = plan_launch(params, kShape, facts);
  const dim3 grid(plan.grid.row_tiles, plan.grid.parts, plan.grid.kv_heads);
  const Merging merging = Tokens::never_cut(params) ? Merging::kNothingIsCut : plan.merging;
  return launch_and_merge(params, merging, facts.num_sms, stream, [&](Merging way, Blocks blocks) {
    return launch_dependent(kernel, grid, plan.threads, plan.shared_bytes, stream, blocks,
                            "launching the decode kernel over bytes", params, way);
  });
}

}  // namespace pallas_attn::mla::sm90::transposed
