// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include <algorithm>

#include "attention/sm90/backward/finish/finish.h"
#include "attention/sm90/backward/kernel.h"
#include "attention/sm90/backward/prepare/prepare.h"
#include "attention/sm90/tensor_tile.h"
#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "common/multiprocessors.h"
#include "common/tensor_map.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Element, typename Shape>
LaunchStatus encode_maps(const BackwardParams& params, Maps* maps) {
  const auto encode = [](const TensorTile<4>& tile, CUtensorMap* map) {
    return encode_tensor_map(tile, ElementTraits<Element>::kTensorMapType, map);
  };
  LaunchStatus status = encode(tile_of("query", params.query, params.query_strides, params.head_dim,
                                       params.num_heads, params.q_len, params.batch, 1, Shape::kQueries),
                               &maps->query);
  if (status.ok()) {
    status = encode(tile_of("d_out", params.d_out, params.out_strides, params.value_dim, params.num_heads,
                            params.q_len, params.batch, 1, Shape::kQueries),
                    &maps->d_out);
  }
  if (status.ok()) {
    status = encode(tile_of("key", params.key, params.key_strides, params.head_dim, params.num_kv_heads,
                            params.kv_len, params.batch, 1, Shape::kKeys),
                    &maps->key);
  }
  if (status.ok()) {
    status = encode(tile_of("value", params.value, params.value_strides, params.value_dim,
                            params.num_kv_heads, params.kv_len, params.batch, 1, Shape::kKeys),
                    &maps->value);
  }
  return status;
}

template <typename Element, typename Shape>
LaunchStatus launch_instance(const BackwardParams& params, cudaStream_t stream) {
  const auto kernel = backward_kernel<Element, Shape>;
  constexpr int kSmemBytes = sizeof(SmemPlan<Shape>);
  static_assert(kSmemBytes <= kSmemLimit);
  // Every time: both answers are those of the current context.
  int num_sms = 0;
  LaunchStatus status = count_multiprocessors(&num_sms);
  if (status.ok()) {
    status = status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
                       "raising the backward kernel's shared memory limit");
  }
  Maps maps;
  if (status.ok()) status = encode_maps<Element, Shape>(params, &maps);
  if (!status.ok()) return status;
  status = launch_prepare(params, {Shape::kQueries, Shape::kKeys}, stream);
  if (!status.ok()) return status;
  if (!params.ordered) {
    const int64_t rows = int64_t{params.batch} * params.num_heads * params.q_len;
    status = status_of(cudaMemsetAsync(params.sums, 0, rows * Shape::kSumColumns * sizeof(float), stream),
                       "zeroing sums");
    if (!status.ok()) return status;
  }
  const int64_t tiles = int64_t{params.max_tiles} * params.num_kv_heads;
  status = launch_dependent(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(num_sms, tiles))),
                            Shape::kThreads, kSmemBytes, stream, Blocks::kIndependent,
                            "launching the backward kernel", params, maps);
  if (!status.ok()) return status;
  return launch_finish(params, Shape::kDim, stream);
}

}  // namespace pallas_attn::attention::sm90::backward
