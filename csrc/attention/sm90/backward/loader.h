// The warp that goes ahead: takes the next key tile, tells the others, and has keys, values, queries and
// gradients of out fetched. What meets nothing it answers itself.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/maps.h"
#include "attention/sm90/backward/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Shape>
class Loader {
 public:
  using Plan = SmemPlan<Shape>;

  __device__ Loader(const BackwardParams& params, const Maps& maps, Plan& smem, int lane)
      : params_(params), maps_(maps), smem_(smem), lane_(lane) {}

  __device__ void work() {
    ptx::wait_for_previous_kernel();
    Place tiles;
    int index = take();
    while (true) {
      ptx::mbarrier_wait(&smem_.told.empty[tiles.stage()][0], tiles.empty());
      Tile& tile = smem_.tiles[tiles.stage()];
      if (lane_ == 0) find(index, tile);
      __syncwarp();
      const bool more = tile.kv_head >= 0;
      if (more) index = take();
      if (more) answer_unseen(tile);
      if (more && tile.queries.begin == tile.queries.end) continue;
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.full[tiles.stage()][0]);
      if (!more) break;
      if (lane_ == 0) load(tile, tiles);
      __syncwarp();
      ++tiles.count;
    }
    ptx::allow_dependent_launch();
  }

 private:
  __device__ int take() const {
    int taken = 0;
    if (lane_ == 0) taken = ptx::fetch_and_increment(params_.taken);
    return __shfl_sync(0xffffffff, taken, 0);
  }

  // Sequences and KV heads in groups, whose tiles are dealt side by side, the first keys first.
  __device__ void find(int index, Tile& tile) const {
    constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries;
    const int streams = params_.batch * params_.num_kv_heads, tiles = ceil_div(params_.kv_len, kKeys);
    const int group = index / (params_.together * tiles), first = group * params_.together;
    tile.kv_head = -1;
    if (first >= streams) return;
    const int side_by_side = min(params_.together, streams - first);
    const int within = index - first * tiles, stream = first + within % side_by_side;
    const int number = within / side_by_side, batch = stream / params_.num_kv_heads;
    const int kv_head = stream - batch * params_.num_kv_heads;
    tile.batch = batch;
    tile.kv_head = kv_head;
    tile.number = number;
    const Band band = {params_.left, params_.right, params_.offset, params_.q_len, params_.kv_len};
    tile.band = band;
    tile.query = 0;
    const int key = number * kKeys, keys = min(kKeys, params_.kv_len - key);
    tile.key = key;
    tile.keys = keys;
    const int slots = ceil_div(params_.q_len, kQueries);
    tile.slots_of_head = slots;
    tile.slot = (batch * params_.num_heads + kv_head * params_.group) * slots;
    const Span seen = band.queries_of(key, key + keys - 1);
    const bool none = seen.begin == seen.end;
    tile.queries = {none ? 0 : seen.begin / kQueries, none ? 0 : ceil_div(seen.end, kQueries)};
    const Span open = band.queries_of_all(key, key + keys - 1);
    tile.open = {ceil_div(open.begin, kQueries), keys < kKeys ? 0 : open.end / kQueries};
  }

  __device__ void load(const Tile& tile, const Place& tiles) {
    constexpr uint32_t kKeyBytes = (Shape::kPieces + Shape::kValuePieces) * Shape::kKeys * kRowBytes;
    ptx::mbarrier_wait(&smem_.keys.empty[tiles.stage()][0], tiles.empty());
    uint64_t* full = &smem_.keys.full[tiles.stage()][0];
    ptx::mbarrier_arrive_expect_bytes(full, kKeyBytes);
#pragma unroll 1
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      ptx::tma_load_4d(smem_.sK[tiles.stage()][piece], &maps_.key, full, piece * kPieceDims, tile.kv_head,
                       tile.key, tile.batch);
    }
#pragma unroll 1
    for (int piece = 0; piece < Shape::kValuePieces; ++piece) {
      ptx::tma_load_4d(smem_.sV[tiles.stage()][piece], &maps_.value, full, piece * kPieceDims, tile.kv_head,
                       tile.key, tile.batch);
    }
    Step step(tile);
    do {
      const int head = tile.kv_head * params_.group + step.head;
      const int token = tile.query + step.query * Shape::kQueries;
      load_rows(smem_.queries, smem_.sQ, maps_.query, head, token, tile.batch);
      load_rows(smem_.outs, smem_.sdO, maps_.d_out, head, token, tile.batch);
      ++steps_.count;
    } while (step.advance(tile, params_.group));
  }

  template <typename Buffers, typename Pieces>
  __device__ __forceinline__ void load_rows(Buffers& ring, Pieces& pieces, const CUtensorMap& map, int head,
                                            int token, int batch) {
    ptx::mbarrier_wait(&ring.empty[steps_.stage()][0], steps_.empty());
    uint64_t* full = &ring.full[steps_.stage()][0];
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(pieces[0]));
#pragma unroll 1
    for (uint32_t piece = 0; piece < sizeof(pieces[0]) / sizeof(pieces[0][0]); ++piece) {
      ptx::tma_load_4d(pieces[steps_.stage()][piece], &map, full, piece * kPieceDims, head, token, batch);
    }
  }

  // Of keys that no query sees, and of queries that see no key, which lie before the first key tile's or
  // behind the last one's.
  __device__ void answer_unseen(const Tile& tile) const {
    const Band& band = tile.band;
    if (tile.queries.begin == tile.queries.end) {
      clear(params_.d_key, params_.key_strides, tile.batch, tile.kv_head, tile.key, tile.keys,
            params_.head_dim);
      clear(params_.d_value, params_.value_strides, tile.batch, tile.kv_head, tile.key, tile.keys,
            params_.value_dim);
    }
    const bool last = (tile.number + 1) * Shape::kKeys >= band.k_len;
    if (tile.number > 0 && !last) return;
    const Span seen = band.queries_of(0, band.k_len - 1);
    // Query tiles that are met are stored whole.
    const int begin = seen.begin == seen.end ? band.q_len : seen.begin / Shape::kQueries * Shape::kQueries;
    const int end = min(ceil_div(seen.end, Shape::kQueries) * Shape::kQueries, band.q_len);
    for (int head = tile.kv_head * params_.group; head < (tile.kv_head + 1) * params_.group; ++head) {
      if (tile.number == 0) {
        clear(params_.d_query, params_.query_strides, tile.batch, head, tile.query, begin, params_.head_dim);
      }
      if (last && seen.begin < seen.end) {
        clear(params_.d_query, params_.query_strides, tile.batch, head, tile.query + end, band.q_len - end,
              params_.head_dim);
      }
    }
  }

  __device__ void clear(void* array, const Strides& strides, int batch, int head, int token, int tokens,
                        int dim) const {
    auto* to = static_cast<uint16_t*>(array) + batch * strides.batch + head * strides.head;
    for (int i = token; i < token + tokens; ++i) {
      for (int chunk = lane_; chunk < dim / 8; chunk += 32) {
        reinterpret_cast<uint4*>(to + i * strides.token)[chunk] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  const BackwardParams& params_;
  const Maps& maps_;
  Plan& smem_;
  const int lane_;
  Place steps_;
};

}  // namespace pallas_attn::attention::sm90::backward
