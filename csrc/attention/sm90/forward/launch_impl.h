// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include <algorithm>
#include <numeric>

#include "attention/merge/merge.h"
#include "attention/prepare/lists.h"
#include "attention/prepare/prepare.h"
#include "attention/prepare/together.h"
#include "attention/sm90/forward/kernel.h"
#include "attention/sm90/forward/woven.h"
#include "attention/sm90/tensor_tile.h"
#include "common/dependent_launch.h"
#include "common/element_traits.h"
#include "common/multiprocessors.h"
#include "common/tensor_map.h"

namespace pallas_attn::attention::sm90 {

// Where pages are beside rows, both are in one box where they meet, and threads copy it: it is kept small.
constexpr int kMostJoinedRows = 16;

template <typename Shape>
Boxes boxes_of(const ForwardParams& params) {
  const int tokens = Shape::kRows / params.group;
  const int query_bytes = Shape::kPieces * tokens * params.group * kRowBytes;
  if (Shape::kFeed == Feed::kGathered) return {0, query_bytes};
  if (Shape::kListed) return {std::min(Shape::kKeys, 1 << params.lists.k_shift), query_bytes};
  if (Shape::kConverted) {
    const int rows = std::gcd(Shape::kKeys, params.page_size);
    return {rows < kLeastRawRows ? 0 : rows, query_bytes};
  }
  if (params.block_tables == nullptr) return {Shape::kKeys, query_bytes};
  const int most = params.new_key == nullptr ? Shape::kKeys : kMostJoinedRows;
  return {std::gcd(most, params.page_size), query_bytes};
}

// Keys and values in pages, or all of them in rows.
template <typename Shape>
auto key_tile_of(const char* name, const ForwardParams& params, const void* array, const Strides& strides,
                 int dim, int rows) {
  const bool paged = params.block_tables != nullptr;
  const int tokens = paged ? params.page_size : params.kv_len;
  const int batch = paged ? params.num_pages : params.batch;
  const int heads = Shape::kListed ? params.num_kv_heads / params.lists.share : params.num_kv_heads;
  if constexpr (Shape::kWoven) {
    return woven_pages(name, array, strides, dim, heads, tokens, batch, rows);
  } else {
    return tile_of(name, array, strides, dim, heads, tokens, batch, 1, rows);
  }
}

// Pages of a cache of bytes, in boxes of whole heads.
inline TensorTile<4> raw_tile_of(const char* name, const ForwardParams& params, const void* array,
                                 const Strides& strides, int dim, int box_dim, int rows) {
  const auto size = [](int64_t extent) { return static_cast<uint64_t>(extent); };
  return {name,
          array,
          {size(dim), size(params.num_kv_heads), size(params.page_size), size(params.num_pages)},
          {size(strides.head), size(strides.token), size(strides.batch)},
          {static_cast<uint32_t>(box_dim), 1, static_cast<uint32_t>(rows), 1}};
}
template <typename Shape>
LaunchStatus encode_raw_maps(const ForwardParams& params, int rows, Maps* maps) {
  if (rows == 0) return {};
  constexpr int kDim = Shape::kPieces * kPieceDims, kValueDim = Shape::kValuePieces * kPieceDims;
  const LaunchStatus status = encode_tensor_map(
      raw_tile_of("key", params, params.key, params.key_strides, params.head_dim, kDim, rows),
      CU_TENSOR_MAP_DATA_TYPE_UINT8, &maps->key);
  if (!status.ok()) return status;
  return encode_tensor_map(
      raw_tile_of("value", params, params.value, params.value_strides, params.value_dim, kValueDim, rows),
      CU_TENSOR_MAP_DATA_TYPE_UINT8, &maps->value);
}

// New tokens beside pages.
template <typename Shape>
auto row_tile_of(const char* name, const ForwardParams& params, const void* array, const Strides& strides,
                 int dim, int rows) {
  if constexpr (Shape::kWoven) {
    return woven_rows(name, array, strides, dim, params.num_kv_heads, params.q_len, params.batch);
  } else {
    return tile_of(name, array, strides, dim, params.num_kv_heads, params.q_len, params.batch, 1, rows);
  }
}

template <typename Element, typename Shape>
LaunchStatus encode_row_maps(const ForwardParams& params, int rows, Maps* maps) {
  constexpr CUtensorMapDataType kElement = ElementTraits<Element>::kTensorMapType;
  if (params.new_key == nullptr) return {};
  const LaunchStatus status = encode_tensor_map(
      row_tile_of<Shape>("new key", params, params.new_key, params.new_key_strides, params.head_dim, rows),
      kElement, &maps->new_key);
  if (!status.ok()) return status;
  return encode_tensor_map(row_tile_of<Shape>("new value", params, params.new_value, params.new_value_strides,
                                              params.value_dim, rows),
                           kElement, &maps->new_value);
}

template <typename Element, typename Shape>
LaunchStatus encode_maps(const ForwardParams& params, const Boxes& boxes, Maps* maps) {
  constexpr CUtensorMapDataType kElement = ElementTraits<Element>::kTensorMapType;
  const int rows = boxes.rows;
  LaunchStatus status = encode_tensor_map(
      tile_of("query", params.query, params.query_strides, params.head_dim, params.num_heads, params.q_len,
              params.batch, params.group, Shape::kRows / params.group),
      kElement, &maps->query);
  if (!status.ok() || Shape::kFeed == Feed::kGathered) return status;
  if (Shape::kConverted) {
    status = encode_raw_maps<Shape>(params, rows, maps);
    return status.ok() ? encode_row_maps<Element, Shape>(params, Shape::kKeys, maps) : status;
  }
  status = encode_tensor_map(
      key_tile_of<Shape>("key", params, params.key, params.key_strides, params.head_dim, rows), kElement,
      &maps->key);
  if (!status.ok()) return status;
  status = encode_tensor_map(
      key_tile_of<Shape>("value", params, params.value, params.value_strides, params.value_dim, rows),
      kElement, &maps->value);
  return status.ok() ? encode_row_maps<Element, Shape>(params, rows, maps) : status;
}

template <typename Element, typename Shape, Form kForm>
LaunchStatus launch_fed(ForwardParams params, cudaStream_t stream) {
  const auto kernel = forward_kernel<Element, Shape, kForm>;
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
  if (has_equal_sequences(params)) params.equal = counters_of_equal(params, tiling);
  if (status.ok()) {
    status = Shape::kListed ? launch_prepare_lists(params, stream) : launch_prepare(params, tiling, stream);
  }
  if (!status.ok()) return status;
  const int blocks =
      static_cast<int>(std::min<int64_t>(num_sms, int64_t{params.max_items} * params.num_kv_heads));
  status = launch_dependent(kernel, dim3(blocks), Shape::kThreads, kSmemBytes, stream, Blocks::kIndependent,
                            "launching the forward kernel", params, maps, boxes);
  if (!status.ok() || params.split_tiles == nullptr) return status;
  return launch_merge(params, Shape::kRows, num_sms, stream);
}

// visit(Shape{}) with the form of the shape that the keys ask for.
template <typename Shape, typename Visit>
auto with_feed(const ForwardParams& params, Visit visit) {
  if (params.cache != CacheType::kElement) return visit(typename Shape::Converted{});
  if (params.block_tables == nullptr) return visit(Shape{});
  if constexpr (Shape::kWeaves) {
    const bool whole = params.head_dim == Shape::kDim && params.value_dim == Shape::kValueDim;
    if (whole && params.page_size % kLeastWovenRows == 0) return visit(typename Shape::Woven{});
  }
  const bool short_pages = params.page_size % kLeastBoxRows != 0;
  return short_pages ? visit(typename Shape::Gathered{}) : visit(Shape{});
}

template <typename Element, typename Shape>
LaunchStatus launch_instance(const ForwardParams& params, cudaStream_t stream) {
  // Documents, and calls with gradients, have their keys in rows.
  const bool full = params.rest != nullptr || params.q_ranks != nullptr;
  if (full) return launch_fed<Element, Shape, Form::kFull>(params, stream);
  const bool scaled = params.key_scale != nullptr || params.value_scale != nullptr;
  if (scaled && params.block_tables == nullptr) {
    return launch_fed<Element, Shape, Form::kScaled>(params, stream);
  }
  return with_feed<Shape>(
      params, [&](auto shape) { return launch_fed<Element, decltype(shape), Form::kUsual>(params, stream); });
}

// In one form, which has what gradients need and is not slower for it; but for fp16, where that is to sum
// probabilities as they are rounded.
template <typename Element, typename Shape>
LaunchStatus launch_listed(const ForwardParams& params, cudaStream_t stream) {
  if constexpr (std::is_same_v<Element, __half>) {
    if (params.rest == nullptr) return launch_fed<Element, Shape, Form::kUsual>(params, stream);
  }
  return launch_fed<Element, Shape, Form::kFull>(params, stream);
}

}  // namespace pallas_attn::attention::sm90
