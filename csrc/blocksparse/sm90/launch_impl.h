// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include <algorithm>

#include "blocksparse/sm90/kernel.h"
#include "common/multiprocessors.h"
#include "common/tensor_map.h"

namespace pallas_attn::blocksparse::sm90 {

// Tiles of one head's tokens in an array [tokens, heads, 128].
inline TensorTile<3> tile_of(const char* name, const void* array, int tokens, int heads) {
  constexpr uint64_t kRow = kHeadDim * sizeof(uint16_t);
  return {name,
          array,
          {kHeadDim, static_cast<uint64_t>(heads), static_cast<uint64_t>(tokens)},
          {kRow, kRow * heads},
          {kPieceDims, 1, kTileKeys}};
}

template <typename Element>
LaunchStatus launch_instance(const PrefillParams& params, cudaStream_t stream) {
  const auto kernel = prefill_kernel<Element>;
  // Every time: both answers are those of the current context.
  int num_sms = 0;
  LaunchStatus status = count_multiprocessors(&num_sms);
  if (status.ok()) {
    status = status_of(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(SmemPlan)}),
        "raising the prefill kernel's shared memory limit");
  }
  if (!status.ok()) return status;

  constexpr CUtensorMapDataType kElement = ElementTraits<Element>::kTensorMapType;
  Maps maps;
  const int tokens = params.num_key_tokens, kv_heads = params.num_kv_heads;
  status = encode_tensor_map(tile_of("query", params.query, params.num_tokens, params.num_heads), kElement,
                             &maps.query);
  if (status.ok())
    status = encode_tensor_map(tile_of("key", params.key, tokens, kv_heads), kElement, &maps.key);
  if (status.ok()) {
    status = encode_tensor_map(tile_of("value", params.value, tokens, kv_heads), kElement, &maps.value);
  }
  if (!status.ok()) return status;
  const int blocks = std::min(num_sms, Scout::num_items(params) * params.num_heads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SmemPlan);
  config.stream = stream;
  return status_of(cudaLaunchKernelEx(&config, kernel, params, maps), "launching the prefill kernel");
}

}  // namespace pallas_attn::blocksparse::sm90
