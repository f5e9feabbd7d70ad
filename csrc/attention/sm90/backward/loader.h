// The warp that goes ahead: takes the next key tile, tells the others, and has keys, values, queries and
// gradients of out fetched. What meets nothing it answers itself.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/document.h"
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
    // Written by the kernel in front, so not through the cache for constants.
    num_tiles_ = __ldcg(&params_.counters->tiles);
    num_seqs_ = num_seqs(params_);
    int index = take(), count = 0;
    while (true) {
      const Place<kToldTiles> tiles = {count};
      ptx::mbarrier_wait(&smem_.told.empty[tiles.stage()][0], tiles.empty());
      Tile& tile = smem_.tiles[tiles.stage()];
      if (lane_ == 0) find(index, tile);
      __syncwarp();
      const bool more = tile.kv_head >= 0;
      if (more) index = take();
      if (more) answer_unseen(tile);
      const bool skips = more && tile.queries.begin == tile.queries.end;
      __syncwarp();  // lane 0 may write the next tile over it
      if (skips) continue;
      if (lane_ == 0) ptx::mbarrier_arrive(&smem_.told.full[tiles.stage()][0]);
      if (!more) break;
      if (lane_ == 0) load(tile, count);
      __syncwarp();
      ++count;
    }
    ptx::allow_dependent_launch();
  }

 private:
  __device__ int take() const {
    int taken = 0;
    if (lane_ == 0) taken = ptx::fetch_and_increment(&params_.counters->taken);
    return __shfl_sync(0xffffffff, taken, 0);
  }

  // KV heads in groups, whose tiles are dealt side by side.
  __device__ void find(int index, Tile& tile) const {
    constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries;
    tile.kv_head = -1;
    if (num_tiles_ == 0) return;
    const int group = index / (params_.heads_together * num_tiles_), first = group * params_.heads_together;
    if (first >= params_.num_kv_heads) return;
    const int side_by_side = min(params_.heads_together, params_.num_kv_heads - first);
    const int within = index - first * num_tiles_, place = within / side_by_side;
    if (place >= num_tiles_) return;
    tile.kv_head = first + within - place * side_by_side;
    const int4 words = __ldcg(reinterpret_cast<const int4*>(params_.tiles + place));
    const KeyTile item = {words.x, words.y, words.z};
    const Document document(params_, item.seq, num_seqs_);
    tile.batch = document.batch;
    tile.number = item.number;
    tile.first_turn = item.first_turn;
    tile.query = document.query;
    tile.key = document.key;
    tile.q_rank = document.q_mixed ? document.rank : -1;
    tile.k_rank = document.k_mixed ? document.rank : -1;
    const Band band = {params_.left, params_.right, params_.offset + document.query - document.key,
                       document.q_len, document.k_len};
    tile.band = band;
    const int key = item.number * kKeys, keys = min(kKeys, document.k_len - key);
    tile.first = key;
    tile.keys = keys;
    tile.queries = tile.open = tile.held_queries = tile.held_keys = {0, 0};
    if (document.q_len == 0 || document.k_len == 0) return;
    tile.held_queries = band.queries_of(0, document.k_len - 1);
    tile.held_keys = band.keys_of(0, document.q_len - 1);
    const Span seen = band.queries_of(key, key + keys - 1);
    if (seen.begin < seen.end) tile.queries = {seen.begin / kQueries, ceil_div(seen.end, kQueries)};
    if (keys < kKeys || document.q_mixed || document.k_mixed) return;
    const Span open = band.queries_of_all(key, key + keys - 1);
    tile.open = {ceil_div(open.begin, kQueries), open.end / kQueries};
  }

  // Keys last: where they have one buffer, the tile before needs it to its end.
  __device__ void load(const Tile& tile, int count) {
    const int token = tile.key + tile.first;
    const Place<Shape::kKeyStages> at = {count};
    Step step(tile.queries);
    load_queries(tile, step);
    fetch(smem_.values, at, smem_.sV[at.stage()], maps_.value, tile.kv_head, token, tile.batch);
    load_outs(tile, step);
    fetch(smem_.keys, at, smem_.sK[at.stage()], maps_.key, tile.kv_head, token, tile.batch);
    ++steps_;
    while (step.advance(tile.queries, params_.group)) {
      load_queries(tile, step);
      load_outs(tile, step);
      ++steps_;
    }
  }
  __device__ __forceinline__ void load_queries(const Tile& tile, const Step& step) {
    const Place<kQueryStages> at = {steps_};
    fetch(smem_.queries, at, smem_.sQ[at.stage()], maps_.query, tile.kv_head * params_.group + step.head,
          tile.query + step.query * Shape::kQueries, tile.batch);
  }
  __device__ __forceinline__ void load_outs(const Tile& tile, const Step& step) {
    const Place<kOutStages> at = {steps_};
    fetch(smem_.outs, at, smem_.sdO[at.stage()], maps_.d_out, tile.kv_head * params_.group + step.head,
          tile.query + step.query * Shape::kQueries, tile.batch);
  }

  template <typename Buffers, typename At, typename Pieces>
  __device__ __forceinline__ void fetch(Buffers& ring, const At& at, Pieces& pieces, const CUtensorMap& map,
                                        int head, int token, int batch) {
    ptx::mbarrier_wait(&ring.empty[at.stage()][0], at.empty());
    uint64_t* full = &ring.full[at.stage()][0];
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(pieces));
#pragma unroll 1
    for (uint32_t piece = 0; piece < sizeof(pieces) / sizeof(pieces[0]); ++piece) {
      ptx::tma_load_4d(pieces[piece], &map, full, piece * kPieceDims, head, token, batch);
    }
  }

  // Of keys that no query sees. Those of queries that see no key come from finish/.
  __device__ void answer_unseen(const Tile& tile) const {
    if (tile.queries.begin < tile.queries.end) return;
    const auto has = [&](int key) { return tile.has_key(params_, key); };
    const Span keys = {tile.first, tile.first + tile.keys};
    clear(params_.d_key, params_.key_strides, tile.batch, tile.kv_head, tile.key, keys, params_.head_dim,
          has);
    clear(params_.d_value, params_.value_strides, tile.batch, tile.kv_head, tile.key, keys, params_.value_dim,
          has);
  }

  template <typename Has>
  __device__ void clear(void* array, const Strides& strides, int batch, int head, int token,
                        const Span& tokens, int dim, Has has) const {
    auto* to = static_cast<uint16_t*>(array) + batch * strides.batch + head * strides.head;
    for (int i = tokens.begin; i < tokens.end; ++i) {
      if (!has(i)) continue;
      for (int chunk = lane_; chunk < dim / 8; chunk += 32) {
        reinterpret_cast<uint4*>(to + (token + i) * strides.token)[chunk] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  const BackwardParams& params_;
  const Maps& maps_;
  Plan& smem_;
  const int lane_;
  int num_tiles_, num_seqs_;
  int steps_ = 0;
};

}  // namespace pallas_attn::attention::sm90::backward
