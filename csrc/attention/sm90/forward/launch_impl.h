// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include <algorithm>
#include <numeric>

#include "attention/merge/merge.h"
#include "attention/prepare/prepare.h"
#include "attention/sm90/forward/kernel.h"
#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "common/multiprocessors.h"
#include "common/tensor_map.h"

namespace pallas_attn::attention::sm90 {

// An array of `batch` times `tokens` tokens, in boxes of `rows` tokens of `box_heads` heads, 64 elements
// each.
inline TensorTile<4> tile_of(const char* name, const void* array, const Strides& strides, int dim, int heads,
                             int tokens, int batch, int box_heads, int rows) {
  const auto bytes = [](int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); };
  const auto size = [](int extent) { return static_cast<uint64_t>(extent); };
  return {name,
          array,
          {size(dim), size(heads), size(tokens), size(batch)},
          {bytes(strides.head), bytes(strides.token), bytes(strides.batch)},
          {kPieceDims, static_cast<uint32_t>(box_heads), static_cast<uint32_t>(rows), 1}};
}

// Where pages are beside rows, both are in one box where they meet, and threads copy it: it is kept small.
constexpr int kMostJoinedRows = 16;

template <typename Shape>
Boxes boxes_of(const ForwardParams& params) {
  const int tokens = Shape::kRows / params.group;
  const int query_bytes = Shape::kPieces * tokens * params.group * kRowBytes;
  if (params.block_tables == nullptr) return {Shape::kKeys, query_bytes};
  const int most = params.new_key == nullptr ? Shape::kKeys : kMostJoinedRows;
  const int rows = std::gcd(most, params.page_size);
  return {rows % kLeastBoxRows == 0 ? rows : 0, query_bytes};
}

template <typename Element, typename Shape>
LaunchStatus encode_maps(const ForwardParams& params, const Boxes& boxes, Maps* maps) {
  constexpr CUtensorMapDataType kElement = ElementTraits<Element>::kTensorMapType;
  const bool paged = params.block_tables != nullptr;
  const int tokens = paged ? params.page_size : params.kv_len;
  const int batch = paged ? params.num_pages : params.batch;
  const int rows = boxes.rows > 0 ? boxes.rows : 1;  // unused where threads copy
  LaunchStatus status = encode_tensor_map(
      tile_of("query", params.query, params.query_strides, params.head_dim, params.num_heads, params.q_len,
              params.batch, params.group, Shape::kRows / params.group),
      kElement, &maps->query);
  if (!status.ok()) return status;
  status = encode_tensor_map(tile_of("key", params.key, params.key_strides, params.head_dim,
                                     params.num_kv_heads, tokens, batch, 1, rows),
                             kElement, &maps->key);
  if (!status.ok()) return status;
  status = encode_tensor_map(tile_of("value", params.value, params.value_strides, params.value_dim,
                                     params.num_kv_heads, tokens, batch, 1, rows),
                             kElement, &maps->value);
  if (!status.ok() || params.new_key == nullptr) return status;
  status = encode_tensor_map(tile_of("new key", params.new_key, params.new_key_strides, params.head_dim,
                                     params.num_kv_heads, params.q_len, params.batch, 1, rows),
                             kElement, &maps->new_key);
  if (!status.ok()) return status;
  return encode_tensor_map(tile_of("new value", params.new_value, params.new_value_strides, params.value_dim,
                                   params.num_kv_heads, params.q_len, params.batch, 1, rows),
                           kElement, &maps->new_value);
}

template <typename Element, typename Shape>
LaunchStatus launch_instance(const ForwardParams& params, cudaStream_t stream) {
  const auto kernel = forward_kernel<Element, Shape>;
  constexpr int kSmemBytes = sizeof(SmemPlan<Shape>);
  static_assert(kSmemBytes <= kSmemLimit);
  // Every time: both answers are those of the current context.
  int num_sms = 0;
  LaunchStatus status = count_multiprocessors(&num_sms);
  if (status.ok()) {
    status = status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
                       "raising the forward kernel's shared memory limit");
  }
  if (!status.ok()) return status;
  const Boxes boxes = boxes_of<Shape>(params);
  Maps maps;
  status = encode_maps<Element, Shape>(params, boxes, &maps);
  const Tiling tiling = {Shape::kRows / params.group, Shape::kKeys, num_sms};
  if (status.ok()) status = launch_prepare(params, tiling, stream);
  if (!status.ok()) return status;
  const int blocks =
      static_cast<int>(std::min<int64_t>(num_sms, int64_t{params.max_items} * params.num_kv_heads));
  status = launch_dependent(kernel, dim3(blocks), Shape::kThreads, kSmemBytes, stream, Blocks::kIndependent,
                            "launching the forward kernel", params, maps, boxes);
  if (!status.ok() || params.split_tiles == nullptr) return status;
  return launch_merge(params, Shape::kRows, num_sms, stream);
}

}  // namespace pallas_attn::attention::sm90
