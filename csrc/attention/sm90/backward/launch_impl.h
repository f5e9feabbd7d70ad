// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include <algorithm>

#include "attention/sm90/backward/kernel.h"
#include "attention/sm90/backward/prepare/prepare.h"
#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "common/multiprocessors.h"
#include "common/tensor_map.h"

namespace pallas_attn::attention::sm90::backward {

// An array of heads, in boxes of `rows` tokens of one head, 64 elements each.
template <typename Element>
LaunchStatus encode_rows(const char* name, const void* array, const Strides& strides, int dim, int heads,
                         int tokens, int batch, int rows, CUtensorMap* map) {
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); };
  const auto size = [](int extent) { return static_cast<uint64_t>(extent); };
  const TensorTile<4> tile = {name,
                              array,
                              {size(dim), size(heads), size(tokens), size(batch)},
                              {bytes(strides.head), bytes(strides.token), bytes(strides.batch)},
                              {kPieceDims, 1, static_cast<uint32_t>(rows), 1}};
  return encode_tensor_map(tile, ElementTraits<Element>::kTensorMapType, map);
}

template <typename Element, typename Shape>
LaunchStatus encode_maps(const BackwardParams& params, Maps* maps) {
  LaunchStatus status =
      encode_rows<Element>("query", params.query, params.query_strides, params.head_dim, params.num_heads,
                           params.q_len, params.batch, Shape::kQueries, &maps->query);
  if (status.ok()) {
    status =
        encode_rows<Element>("d_out", params.d_out, params.out_strides, params.value_dim, params.num_heads,
                             params.q_len, params.batch, Shape::kQueries, &maps->d_out);
  }
  if (status.ok()) {
    status = encode_rows<Element>("key", params.key, params.key_strides, params.head_dim, params.num_kv_heads,
                                  params.kv_len, params.batch, Shape::kKeys, &maps->key);
  }
  if (status.ok()) {
    status =
        encode_rows<Element>("value", params.value, params.value_strides, params.value_dim,
                             params.num_kv_heads, params.kv_len, params.batch, Shape::kKeys, &maps->value);
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
  const int64_t tiles = int64_t{params.max_tiles} * params.num_kv_heads;
  return launch_dependent(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(num_sms, tiles))),
                          Shape::kThreads, kSmemBytes, stream, Blocks::kIndependent,
                          "launching the backward kernel", params, maps);
}

}  // namespace pallas_attn::attention::sm90::backward
