// Launching one instantiation; included by the files under instantiations/ only.
#pragma once

#include "common/dependent_launch.h"
#include "common/math.h"
#include "common/tensor_map.h"
#include "mla/combine/combine.h"
#include "mla/element_traits.h"
#include "mla/sm90/dense/kernel.h"

namespace pallas_attn::mla::sm90 {

template <typename Element>
LaunchStatus launch_instance(const DecodeParams& params, cudaStream_t stream) {
  constexpr CUtensorMapDataType kDtype = ElementTraits<Element>::kTensorMapType;
  constexpr uint64_t kTokenBytes = kQueryDim * 2;
  const uint64_t rows = params.rows();
  const uint64_t kv_heads = params.num_kv_heads;

  CUtensorMap query_map;
  LaunchStatus status = encode_tensor_map({kDtype,
                                           params.query,
                                           {kQueryDim, rows, params.batch * kv_heads},
                                           {kTokenBytes, kTokenBytes * rows},
                                           {kPieceDims, kTileRows, 1}},
                                          &query_map);
  if (!status.ok()) return status;

  // A warp's rows of the output.
  constexpr uint64_t kOutBytes = kLatentDim * 2;
  CUtensorMap out_map;
  status = encode_tensor_map({kDtype,
                              params.out,
                              {kLatentDim, rows, params.batch * kv_heads},
                              {kOutBytes, kOutBytes * rows},
                              {kPieceDims, kTileRows / kSideWarps, 1}},
                             &out_map);
  if (!status.ok()) return status;

  // The KV heads of a token lie side by side: to the copy engine they are one long row.
  const uint64_t slot_bytes = kTokenBytes * kv_heads;
  CUtensorMap cache_map;
  status = encode_tensor_map({kDtype,
                              params.latent_cache,
                              {kQueryDim * kv_heads, kPageTokens, static_cast<uint64_t>(params.num_pages)},
                              {slot_bytes, slot_bytes * kPageTokens},
                              {kPieceDims, kPageTokens, 1}},
                             &cache_map);
  if (!status.ok()) return status;

  // Every time, because the limit belongs to the current device and one process may drive several.
  const auto kernel = dense_decode_kernel<Element>;
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SmemPlan));
  if (raised != cudaSuccess) return {raised, "raising the decode kernel's shared memory limit"};

  int device = 0, num_sms = 0;
  cudaError_t found = cudaGetDevice(&device);
  if (found == cudaSuccess) found = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (found != cudaSuccess) return {found, "asking for the number of multiprocessors"};

  if (reinterpret_cast<uintptr_t>(params.partial_out) % ptx::kLineBytes != 0) {
    return {cudaErrorMisalignedAddress, "looking for partial results that begin on a line of 128 bytes"};
  }

  // One CTA fills an SM. As long as all CTAs run at once they can wait for each other and merge what was cut.
  const dim3 grid(ceil_div(params.rows(), kTileRows), params.num_sm_parts, params.num_kv_heads);
  const bool together = static_cast<int64_t>(grid.x) * grid.y * grid.z <= num_sms;
  Merging merging = Merging::kNothingIsCut;
  if (params.num_sm_parts > 1) {
    merging = together && !few_rows_to_merge(params, num_sms) ? Merging::kInside : Merging::kKernelFollows;
  }
  // The launch and the set-up of the barriers overlap the end of the kernel before.
  const Blocks blocks = merging == Merging::kInside ? Blocks::kCooperative : Blocks::kIndependent;
  status = launch_dependent(kernel, grid, kThreads, sizeof(SmemPlan), stream, blocks,
                            "launching the decode kernel", params, query_map, cache_map, out_map, merging);
  if (!status.ok() || merging != Merging::kKernelFollows) return status;
  return launch_combine(params, num_sms, stream);
}

}  // namespace pallas_attn::mla::sm90
