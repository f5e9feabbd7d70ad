#include "attention/lists.h"
#include "attention/prepare/buckets.h"
#include "attention/prepare/lists.h"
#include "attention/prepare/prepare.h"
#include "attention/prepare/unite.h"
#include "common/block_team.h"
#include "ptx/control.h"

namespace pallas_attn::attention {
namespace {

using Team = BlockTeam<kPrepareThreads, false>;

struct Scratch {
  Team::Scratch team;
  int counts[kBuckets], starts[kBuckets];
  int first_tile[kMostPreparedSeqs + 3];  // tiles in front of each sequence
};

// About how many blocks of 64 keys the item's list names. What is in the list, whoever works on it looks at.
__device__ int length_of(const ForwardParams& params, const ListedSequence& seq, const WorkItem& item) {
  const int place = item.token + seq.offset;
  if (seq.k_len == 0 || place < 0) return 0;
  const List list(params.lists, seq.batch, item.head, place);
  const int64_t keys = int64_t{list.num_blocks} << params.lists.k_shift;
  const int within = params.lists.row_pointers == nullptr ? seq.k_len : (place | (kListedQueries - 1)) + 1;
  return static_cast<int>(min(keys, int64_t{within}) / 64);
}

// Each CTA orders the tiles of some heads, those that are worked on side by side, the longest first; lists
// that all heads have in common, a single one.
__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_lists_kernel(const __grid_constant__ ForwardParams params) {
  ptx::allow_dependent_launch();
  __shared__ Scratch scratch;
  const Team team(scratch.team);
  const int num_seqs = params.num_seqs, seqs = num_seqs + padding_seqs(params);
  const int heads = gridDim.x > 1 ? params.heads_in_l2 : params.lists.heads;
  const int first_head = blockIdx.x * heads;

  const auto tiles_of = [&](int seq) {
    const ListedSequence sequence(params, seq, num_seqs);
    return !sequence.padding && sequence.q_len <= params.skip_rows ? 0 : sequence.tiles();
  };
  int tiles = team.prefix_sum(seqs, tiles_of, scratch.first_tile).sum;
  // Lengths that lie end to end add up to what there is room for; what else may come does not get through.
  tiles = min(tiles, params.max_items / params.lists.heads);
  scratch.counts[threadIdx.x] = 0;
  __syncthreads();
  const auto item_of = [&](int i) {
    const int tile = i / heads;
    int low = 0, high = seqs;  // the last sequence that has no more tiles in front of it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (scratch.first_tile[middle] <= tile ? low : high) = middle;
    }
    const ListedSequence sequence(params, low, num_seqs);
    WorkItem item = sequence.item(low, tile - scratch.first_tile[low], first_head + i % heads);
    item.num_keys = length_of(params, sequence, item);
    return item;
  };
  team.each(tiles * heads, [&](int i) { atomicAdd(&scratch.counts[bucket_of(item_of(i).num_keys)], 1); });
  team.prefix_sum(kBuckets, [&](int bucket) { return scratch.counts[bucket]; }, scratch.starts);
  __syncthreads();
  WorkItem* const items = params.items + int64_t{first_head} * tiles;
  team.each(tiles * heads, [&](int i) {
    const WorkItem item = item_of(i);
    items[atomicAdd(&scratch.starts[bucket_of(item.num_keys)], 1)] = item;
  });
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *params.counters = {0, tiles * params.lists.heads, 0, params.lists.heads > 1 ? 1 : params.heads_in_l2};
  }
}

}  // namespace

LaunchStatus launch_prepare_lists(const ForwardParams& params, cudaStream_t stream) {
  if (params.lists.united != nullptr) {
    const int tiles = params.lists.heads * united_rows(params.lists);
    unite_kernel<<<ceil_div(tiles, kUniteWarps), kUniteWarps * 32, 0, stream>>>(params.lists);
    const LaunchStatus status = status_of(cudaGetLastError(), "launching the kernel that unites rows");
    if (!status.ok()) return status;
  }
  const int ctas = params.lists.heads > 1 ? params.num_heads / params.heads_in_l2 : 1;
  prepare_lists_kernel<<<ctas, kPrepareThreads, 0, stream>>>(params);
  return status_of(cudaGetLastError(), "launching the prepare kernel of lists");
}

}  // namespace pallas_attn::attention
