// plan_launch for test_launch_plan.py, in plain numbers.
#include <cstring>

#include "mla/sm90/dense/launch_plan.h"

namespace {

using namespace pallas_attn;

// The dense kernel's.
constexpr mla::sm90::KernelShape kShape = {64, 16, 64, 384, 226324, 256};

struct Call {
  int batch, query_len, num_kv_heads, group, num_pages, max_blocks, num_sm_parts, merge_apart;
};

struct Tile {
  char name[16];
  uint64_t base, extent[3], strides_bytes[2];
  uint32_t box[3];
};

struct Plan {
  int grid[3], threads, shared_bytes, merging, cooperative;
  Tile tiles[3];
};

Tile plain(const TensorTile<3>& tile) {
  Tile result = {};
  std::strncpy(result.name, tile.name, sizeof(result.name) - 1);
  result.base = reinterpret_cast<uint64_t>(tile.base);
  std::memcpy(result.extent, tile.extent, sizeof(tile.extent));
  std::memcpy(result.strides_bytes, tile.strides_bytes, sizeof(tile.strides_bytes));
  std::memcpy(result.box, tile.box, sizeof(tile.box));
  return result;
}

}  // namespace

extern "C" void plan_on_host(const Call* call, int num_sms, int blocks_per_sm, Plan* result) {
  mla::DecodeParams params = {};
  params.query = reinterpret_cast<const void*>(0x1000);
  params.latent_cache = reinterpret_cast<const void*>(0x2000);
  params.out = reinterpret_cast<void*>(0x3000);
  params.batch = call->batch;
  params.query_len = call->query_len;
  params.num_kv_heads = call->num_kv_heads;
  params.group = call->group;
  params.num_pages = call->num_pages;
  params.max_blocks = call->max_blocks;
  params.num_sm_parts = call->num_sm_parts;
  params.merge_apart = call->merge_apart;
  const mla::sm90::LaunchPlan plan = mla::sm90::plan_launch(params, kShape, {num_sms, blocks_per_sm});
  *result = {{plan.grid.row_tiles, plan.grid.parts, plan.grid.kv_heads},
             plan.threads,
             static_cast<int>(plan.shared_bytes),
             static_cast<int>(plan.merging),
             plan.cooperative(),
             {plain(plan.query), plain(plan.latent_cache), plain(plan.out)}};
}
