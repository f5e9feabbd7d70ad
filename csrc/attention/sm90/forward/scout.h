// The warp that goes ahead: takes the next work item, finds where its queries and keys lie, tells the others,
// and has the queries fetched. It is a tile ahead of them, so that nobody waits for its loads, which depend
// on each other. What sees nothing it answers itself.
//
// Work items are taken from a counter, so that no CTA is left with the long ones; what a tile's result is
// does not depend on who took it.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/rules.h"
#include "attention/sm90/forward/documents.h"
#include "attention/sm90/forward/list_entries.h"
#include "attention/sm90/forward/maps.h"
#include "attention/sm90/forward/smem_plan.h"
#include "ptx/cache.h"
#include "ptx/control.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::attention::sm90 {

template <typename Shape>
class Scout {
 public:
  using Plan = SmemPlan<Shape>;
  using Told = typename Plan::Told;

  __device__ Scout(const ForwardParams& params, const Maps& maps, const Boxes& boxes, Plan& smem, int lane)
      : params_(params), maps_(maps), boxes_(boxes), smem_(smem), lane_(lane) {}

  __device__ void work() {
    // Of equal sequences nothing is worked out: the kernel in front has only to open the counter.
    const bool equal = Shape::kFeed == Feed::kEngine && has_equal_sequences(params_);
    if (!equal) ptx::wait_for_previous_kernel();
    // Written by the kernel in front, so not through the cache for constants.
    const int items = equal ? params_.equal.items : __ldcg(&params_.counters->items);
    const int together = equal ? params_.equal.together : __ldcg(&params_.counters->together);
    // Where heads have lists of their own, work items are of one head.
    const bool of_heads = Shape::kListed && params_.lists.heads > 1;
    const int total = of_heads ? items : items * params_.num_kv_heads;
    const int num_seqs = num_seqs_now(params_);
    const Window window(params_);
    Phases<kToldTiles> told_phases;
    Phases<Shape::kQueryStages> query_phases;
    int told = 0, stage = 0;
    for (int index = blockIdx.x;;) {
      Told tile;
      tile.kv_head = -1;
      if (index >= total || find(index, items, together, num_seqs, window, tile)) {
        ptx::mbarrier_wait(&smem_.told.empty[told][0], told_phases.empty(told));
        if (lane_ == 0) {
          smem_.tiles[told] = tile;
          ptx::mbarrier_arrive(&smem_.told.full[told][0]);
        }
        told_phases.advance(told);
        told = next_told(told);
        if (index >= total) {
          ptx::allow_dependent_launch();
          return;
        }
        ptx::mbarrier_wait(&smem_.queries.empty[stage][0], query_phases.empty(stage));
        if (lane_ == 0) load_query(tile, stage);
        query_phases.advance(stage);
        stage = (stage + 1) % Shape::kQueryStages;
        // What is taken waits for this CTA, while others may have nothing to do. Where queries of two tiles
        // have room, it is taken when those of the tile before are gone.
        if (Shape::kQueryStages > 1) {
          ptx::mbarrier_wait(&smem_.queries.empty[stage][0], query_phases.empty(stage));
        }
      }
      if (equal) ptx::wait_for_previous_kernel();
      int taken = 0;
      if (lane_ == 0) taken = ptx::fetch_and_increment(&params_.counters->taken);
      index = gridDim.x + __shfl_sync(0xffffffff, taken, 0);
    }
  }

 private:
  // Whether there is something to compute.
  __device__ bool find(int index, int items, int together, int num_seqs, const Window& window,
                       Told& tile) const {
    if constexpr (Shape::kFeed == Feed::kEngine) {
      if (has_equal_sequences(params_)) return find_equal(index, items, together, window, tile);
    }
    const int turn = index / together;
    const WorkItem item = load_item(params_.items + turn % items);
    tile.kv_head = turn / items * together + index % together;
    if constexpr (Shape::kListed) {
      return find_listed(item, num_seqs, tile);
    } else {
      return find_in_line(item, num_seqs, window, tile);
    }
  }

  // Pairs of a sequence and a KV head, `together` at a time, tile by tile: the last ones first, which see
  // most keys where masks are causal.
  __device__ __forceinline__ bool find_equal(int index, int items, int together, const Window& window,
                                             Told& tile) const {
    const int heads = params_.num_kv_heads, tiles = items / params_.num_seqs;
    const int first = index / (together * tiles) * together, within = index - first * tiles;
    const int pair = first + within % together, seq = pair / heads;
    tile.kv_head = pair % heads;
    const WorkItem item = item_of(Sequence(params_, seq, params_.num_seqs), window, seq,
                                  tiles - 1 - within / together, Shape::kRows / params_.group, Shape::kKeys);
    return find_in_line(item, params_.num_seqs, window, tile);
  }

  // All keys from the first to the last that is seen.
  __device__ __forceinline__ bool find_in_line(const WorkItem& item, int num_seqs, const Window& window,
                                               Tile& tile) const {
    const Sequence seq(params_, item.seq, num_seqs);
    tile.batch = seq.batch;
    tile.token = seq.q_begin + item.token;
    tile.tokens = item.tokens;
    tile.is_lone = item.tokens == seq.q_len;
    tile.place = item.token + seq.offset;
    tile.seq = item.seq;
    tile.k_len = seq.k_len;
    tile.in_pages = seq.in_pages;
    tile.k_begin = seq.k_begin;
    tile.first_key = item.first_key;
    tile.num_keys = item.num_keys;
    tile.partial = item.partial;
    tile.q_rank = seq.q_mixed ? seq.rank : -1;
    tile.k_rank = seq.k_mixed ? seq.rank : -1;
    // Scales that differ from key to key, keys and values have already.
    const bool apart = params_.new_key != nullptr;
    tile.scale =
        __ldg(params_.scale) * head_scale(params_.key_scale, params_.key_scale_by_page || apart, tile);
    tile.value_scale = head_scale(params_.value_scale, params_.value_scale_by_page || apart, tile);
    if (item.num_keys == 0) {
      answer_nothing(tile, seq);
      return false;
    }
    constexpr int kKeys = Shape::kKeys;
    const int last_place = tile.place + item.tokens - 1;
    tile.open_begin = ceil_div(window.begin(last_place), kKeys);
    tile.open_end = seq.k_mixed ? 0 : window.end(tile.place, seq.k_len) / kKeys;
    tile.seen_begin = window.begin(seq.offset);
    tile.seen_end = window.end(seq.offset + seq.q_len - 1, seq.k_len);
    return true;
  }

  __device__ __forceinline__ bool find_listed(const WorkItem& item, int num_seqs, ListedTile& tile) const {
    ListedSequence seq(params_, item.seq, num_seqs);
    if (params_.lists.heads > 1) tile.kv_head = item.head;
    tile.batch = seq.batch;
    tile.token = seq.q_begin + item.token;
    tile.tokens = item.tokens;
    tile.place = item.token + seq.offset;
    tile.seq = item.seq;
    tile.k_begin = seq.k_begin;
    tile.is_lone = false;
    tile.first_key = tile.num_keys = tile.seen_begin = tile.in_pages = 0;
    tile.partial = tile.q_rank = tile.k_rank = -1;
    tile.scale = __ldg(params_.scale);
    tile.value_scale = 1.0f;
    if (seq.k_len > 0 && tile.place >= 0) {
      seq.bad = !find_keys<Shape::kKeys>(params_, seq, lane_, tile);
      if (!seq.bad && tile.num_keys > 0) return true;
    }
    answer_nothing(tile, seq);
    return false;
  }

  static __device__ float head_scale(const float* scales, bool of_keys, const Tile& tile) {
    return scales == nullptr || of_keys ? 1.0f : __ldg(scales + tile.kv_head);
  }

  static __device__ __forceinline__ WorkItem load_item(const WorkItem* from) {
    const int4* words = reinterpret_cast<const int4*>(from);
    const int4 low = __ldcg(words), high = __ldcg(words + 1);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z};
  }

  __device__ void load_query(const Tile& tile, int stage) const {
    uint64_t* full = &smem_.queries.full[stage][0];
    ptx::mbarrier_arrive_expect_bytes(full, boxes_.query_bytes);
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      ptx::tma_load_4d(smem_.sQ[stage][piece], &maps_.query, full, piece * kPieceDims,
                       tile.kv_head * params_.group, tile.token, tile.batch);
    }
  }

  __device__ void answer_nothing(const Tile& tile, const Sequence& seq) const {
    // NaN in bf16 and in fp16.
    const uint32_t word = seq.bad ? 0xffffffff : 0;
    const int chunks = params_.value_dim / 8;
    auto* out = static_cast<uint16_t*>(params_.out) + tile.batch * params_.out_strides.batch;
    auto* low = static_cast<uint8_t*>(params_.low);
    if (low != nullptr) low += tile.batch * params_.out_strides.batch;
    const Group group(params_.group);
    for (int row = 0; row < tile.tokens * group.size; ++row) {
      if (!is_answered<Form::kFull>(params_, tile, group, row)) continue;
      const int64_t token = tile.token + row / group.size,
                    head = tile.kv_head * group.size + row % group.size;
      const int64_t place = token * params_.out_strides.token + head * params_.out_strides.head;
      for (int i = lane_; i < chunks; i += 32) {
        reinterpret_cast<uint4*>(out + place)[i] = make_uint4(word, word, word, word);
        if (low != nullptr) reinterpret_cast<uint2*>(low + place)[i] = make_uint2(0, 0);
      }
      if (lane_ == 0) {
        const int64_t place = tile.batch * params_.lse_strides.batch + token * params_.lse_strides.token +
                              head * params_.lse_strides.head;
        // A sequence's query that sees no key still sees the sink.
        const bool sees_sink =
            params_.sinks != nullptr && !seq.padding && (seq.k_len > 0 || params_.sinks_without_keys);
        const float sink = sees_sink ? __ldg(params_.sinks + head) : -INFINITY;
        const bool base2 = params_.base2_lse || params_.rest != nullptr;
        const float lse = seq.bad ? NAN : sink * (base2 ? kLog2E : 1.0f);
        params_.lse[place] = params_.rest == nullptr ? lse : -INFINITY;
        if (params_.rest != nullptr) params_.rest[place] = lse;
      }
    }
  }

  const ForwardParams& params_;
  const Maps& maps_;
  const Boxes& boxes_;
  Plan& smem_;
  const int lane_;
};

}  // namespace pallas_attn::attention::sm90
