#include "mla/sm90/dense/launch_plan.h"

#include <algorithm>

#include "common/math.h"

namespace pallas_attn::mla::sm90 {
namespace {

constexpr uint64_t kElementBytes = 2;

// The CTAs that merge what they have cut themselves need no second kernel, but must all run at once: then the
// driver waits until the whole device is free, and beside the kernels of others (a collective's, say) there
// is no room. Few rows are merged faster behind.
Merging who_merges(const DecodeParams& params, int64_t blocks, const KernelShape& kernel,
                   const DeviceFacts& device) {
  if (params.num_sm_parts == 1) return Merging::kNothingIsCut;
  const bool together = blocks <= int64_t{device.num_sms} * device.blocks_per_sm;
  const bool listed = std::min(params.batch, params.num_sm_parts) <= kernel.most_cut_requests;
  const bool inside = together && listed && !params.merge_apart && !few_rows_to_merge(params, device.num_sms);
  return inside ? Merging::kInside : Merging::kKernelFollows;
}

}  // namespace

LaunchPlan plan_launch(const DecodeParams& params, const KernelShape& kernel, const DeviceFacts& device) {
  const uint64_t rows = params.rows();
  const uint64_t kv_heads = params.num_kv_heads;
  const uint64_t all_kv_heads = params.batch * kv_heads;
  const auto columns = static_cast<uint32_t>(kernel.piece_dims);

  LaunchPlan plan = {};
  plan.grid = {ceil_div(params.rows(), kernel.tile_rows), params.num_sm_parts, params.num_kv_heads};
  plan.threads = kernel.threads;
  plan.shared_bytes = kernel.shared_bytes;
  plan.merging = who_merges(params, plan.grid.blocks(), kernel, device);

  constexpr uint64_t kQueryBytes = kQueryDim * kElementBytes;
  plan.query = {"query",
                params.query,
                {kQueryDim, rows, all_kv_heads},
                {kQueryBytes, kQueryBytes * rows},
                {columns, static_cast<uint32_t>(kernel.tile_rows), 1}};

  constexpr uint64_t kOutBytes = kLatentDim * kElementBytes;
  plan.out = {"out",
              params.out,
              {kLatentDim, rows, all_kv_heads},
              {kOutBytes, kOutBytes * rows},
              {columns, static_cast<uint32_t>(kernel.store_rows), 1}};

  // The KV heads of a token lie side by side: to the copy engine they are one long row.
  const uint64_t width = kQueryDim * kv_heads;
  const uint64_t token_bytes = width * kElementBytes;
  plan.latent_cache = {"latent_cache",
                       params.latent_cache,
                       {width, kPageTokens, static_cast<uint64_t>(params.num_pages)},
                       {token_bytes, token_bytes * kPageTokens},
                       {columns, kPageTokens, 1}};
  return plan;
}

}  // namespace pallas_attn::mla::sm90
