// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "common/math.h"
#include "common/tensor_map.h"
#include "mla/sm90/dense/kernel.h"

namespace pallas_attn::mla::sm90 {

template <typename Traits>
LaunchStatus launch_instance(const DecodeParams& params, cudaStream_t stream) {
  constexpr CUtensorMapDataType kDtype = std::is_same_v<typename Traits::Element, __nv_bfloat16>
                                             ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  constexpr uint64_t kTokenBytes = kQueryDim * 2;
  const uint64_t rows = params.rows();

  CUtensorMap query_map;
  LaunchStatus status = encode_tensor_map({kDtype,
                                           params.query,
                                           {kQueryDim, rows, static_cast<uint64_t>(params.batch)},
                                           {kTokenBytes, kTokenBytes * rows},
                                           {kPieceDims, kTileRows, 1}},
                                          &query_map);
  if (!status.ok()) return status;

  CUtensorMap cache_map;
  status = encode_tensor_map({kDtype,
                              params.latent_cache,
                              {kQueryDim, kPageTokens, static_cast<uint64_t>(params.num_pages)},
                              {kTokenBytes, kTokenBytes * kPageTokens},
                              {kPieceDims, kPageTokens / Traits::kClusterSize, 1}},
                             &cache_map);
  if (!status.ok()) return status;

  const auto kernel = dense_decode_kernel<Traits>;
  static const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SmemPlan));
  if (raised != cudaSuccess) return {raised, "raising the decode kernel's shared memory limit"};

  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Traits::kClusterSize, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ceil_div(params.rows(), kTileRows), params.num_sm_parts);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(SmemPlan);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = Traits::kMulticast ? 1 : 0;
  return {cudaLaunchKernelEx(&config, kernel, params, query_map, cache_map), "launching the decode kernel"};
}

// Two row tiles of a request read the same pages: where they pair up, they load them together.
template <typename Element>
LaunchStatus launch_for_rows(const DecodeParams& params, cudaStream_t stream) {
  const int row_tiles = ceil_div(params.rows(), kTileRows);
  if (row_tiles % 2 == 0) return launch_instance<DecodeTraits<Element, 2>>(params, stream);
  return launch_instance<DecodeTraits<Element, 1>>(params, stream);
}

}  // namespace pallas_attn::mla::sm90
