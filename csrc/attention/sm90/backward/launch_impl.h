// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "attention/sm90/backward/encode_maps.h"
#include "attention/sm90/backward/finish/finish.h"
#include "attention/sm90/backward/kernel.h"
#include "attention/sm90/backward/launch_grid.h"
#include "attention/sm90/backward/prepare/prepare.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Element, typename Shape>
LaunchStatus launch_instance(const BackwardParams& params, cudaStream_t stream) {
  Maps maps;
  LaunchStatus status = encode_maps<Element>(params, Shape::kQueries, Shape::kKeys, &maps);
  if (status.ok()) status = launch_prepare(params, {Shape::kKeys, 0}, stream);
  if (status.ok() && !params.ordered) {
    const int64_t rows = int64_t{params.batch} * params.num_heads * params.q_len;
    status = status_of(cudaMemsetAsync(params.sums, 0, rows * Shape::kSumColumns * sizeof(float), stream),
                       "zeroing sums");
  }
  if (!status.ok()) return status;
  const int64_t tiles = most_tiles(params, params.k_spans, params.kv_len, Shape::kKeys) * params.num_kv_heads;
  status = launch_grid<SmemPlan<Shape>>(backward_kernel<Element, Shape>, params, maps, tiles, Shape::kThreads,
                                        stream);
  if (!status.ok()) return status;
  return launch_finish(params, Shape::kDim, stream);
}

}  // namespace pallas_attn::attention::sm90::backward
