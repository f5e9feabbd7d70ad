#include "attention/prepare/prepare.h"

#include "attention/rules.h"
#include "common/block_team.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

constexpr int kThreads = 1024;
using Team = BlockTeam<kThreads, false>;

// Work items are sorted by how many key tiles they have, up to kExact of them to the tile, beyond that
// roughly: begun early they all are.
constexpr int kBuckets = kThreads, kExact = 512, kRough = 16;

struct Scratch {
  Team::Scratch team;
  int counts[kBuckets], starts[kBuckets];
  int first_tile[];  // [sequences + 1]: tiles in front of each
};

__device__ int bucket_of(int keys) {
  const int from_least = keys < kExact ? keys : min(kExact + (keys - kExact) / kRough, kBuckets - 1);
  return kBuckets - 1 - from_least;
}

struct Batch {
  const ForwardParams& params;
  int tile_tokens, tile_keys, num_seqs;

  __device__ int tiles_of(int seq) const {
    const Sequence sequence(params, seq, num_seqs);
    const int rows = sequence.q_len * (params.num_heads / params.num_kv_heads);
    if (!sequence.padding && rows <= params.skip_rows) return 0;
    return ceil_div(sequence.q_len, tile_tokens);
  }

  __device__ WorkItem item(const Window& window, int seq, int tile) const {
    const Sequence sequence(params, seq, num_seqs);
    WorkItem item = {seq, tile * tile_tokens, 0, 0, 0, -1};
    item.tokens = min(tile_tokens, sequence.q_len - item.token);
    const int place = item.token + sequence.offset;
    const int begin = window.begin(place), end = window.end(place + item.tokens - 1, sequence.k_len);
    if (begin < end) {
      item.first_key = begin / tile_keys;
      item.num_keys = ceil_div(end, tile_keys) - item.first_key;
    }
    return item;
  }
};

__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ ForwardParams params, int tile_tokens, int tile_keys) {
  ptx::allow_dependent_launch();
  extern __shared__ char shared_memory[];
  auto& scratch = *reinterpret_cast<Scratch*>(shared_memory);
  const Team team(scratch.team);
  const Batch batch = {params, tile_tokens, tile_keys, num_seqs_now(params)};
  const Window window(params);
  const int seqs = batch.num_seqs + padding_seqs(params);

  // Lengths that lie end to end add up to what there is room for; what else may come does not get through.
  const int tiles = min(
      team.prefix_sum(seqs, [&](int seq) { return batch.tiles_of(seq); }, scratch.first_tile).sum,
      params.max_items);
  scratch.counts[threadIdx.x] = 0;
  __syncthreads();
  const auto seq_of = [&](int tile) {
    int low = 0, high = seqs;  // the last one with no more tiles in front of it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (scratch.first_tile[middle] <= tile ? low : high) = middle;
    }
    return low;
  };
  const auto item_of = [&](int tile) {
    const int seq = seq_of(tile);
    return batch.item(window, seq, tile - scratch.first_tile[seq]);
  };
  team.each(tiles, [&](int tile) { atomicAdd(&scratch.counts[bucket_of(item_of(tile).num_keys)], 1); });
  team.prefix_sum(kBuckets, [&](int bucket) { return scratch.counts[bucket]; }, scratch.starts);
  __syncthreads();
  team.each_at_last(tiles, [&](int tile) {
    const WorkItem item = item_of(tile);
    params.items[atomicAdd(&scratch.starts[bucket_of(item.num_keys)], 1)] = item;
  });
  if (threadIdx.x == 0) *params.counters = {0, tiles, 0, 0};
}

}  // namespace

LaunchStatus launch_prepare(const ForwardParams& params, int tile_tokens, int tile_keys, cudaStream_t stream) {
  const size_t bytes = sizeof(Scratch) + (params.num_seqs + padding_seqs(params) + 1) * sizeof(int);
  if (bytes > 48 * 1024) {
    const LaunchStatus status = status_of(
        cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "raising the prepare kernel's shared memory limit");
    if (!status.ok()) return status;
  }
  prepare_kernel<<<1, kThreads, bytes, stream>>>(params, tile_tokens, tile_keys);
  return status_of(cudaGetLastError(), "launching the prepare kernel");
}

}  // namespace pallas_attn::attention
