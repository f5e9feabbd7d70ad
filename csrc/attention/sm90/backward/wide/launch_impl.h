// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "attention/sm90/backward/encode_maps.h"
#include "attention/sm90/backward/launch_grid.h"
#include "attention/sm90/backward/prepare/prepare.h"
#include "attention/sm90/backward/wide/kernel.h"

namespace pallas_attn::attention::sm90::backward::wide {

template <typename Element, typename Shape>
LaunchStatus launch_instance(const BackwardParams& params, cudaStream_t stream) {
  Maps maps;
  LaunchStatus status = encode_maps<Element>(params, kMet, kMet, &maps);
  if (status.ok()) status = launch_prepare(params, {kHeld, kHeld}, stream);
  each_pass<Shape>([&](auto pass) {
    using Pass = decltype(pass);
    if (!status.ok()) return;
    const int64_t tiles =
        Pass::kHoldsQueries ? most_tiles(params, params.q_spans, params.q_len, kHeld) * params.num_heads
                            : most_tiles(params, params.k_spans, params.kv_len, kHeld) * params.num_kv_heads;
    status =
        launch_grid<SmemPlan<Pass>>(backward_kernel<Element, Pass>, params, maps, tiles, kThreads, stream);
  });
  return status;
}

}  // namespace pallas_attn::attention::sm90::backward::wide
