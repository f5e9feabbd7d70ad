// Tiles to be held, one at a time, by whichever CTA is free: from prepare's list to what roles are told.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/document.h"
#include "attention/sm90/backward/walk.h"
#include "ptx/cache.h"

namespace pallas_attn::attention::sm90::backward {

// Tiles of kHeld tokens of one side, which meet tiles of kMet of the other. For a whole warp.
template <Side kSide, int kHeld, int kMet, bool kOfLayout = false>
class TileList {
 public:
  // Heads in groups of `side_by_side`, whose tiles are dealt in turns.
  __device__ TileList(const BackwardParams& params, BackwardCounters* counters, int side_by_side)
      : params_(params),
        counters_(counters),
        num_tiles_(__ldcg(&counters->tiles)),  // of the kernel in front: not through the cache for constants
        num_seqs_(num_seqs(params)),
        side_by_side_(side_by_side) {}

  __device__ int take(int lane) const {
    int taken = 0;
    if (lane == 0) taken = ptx::fetch_and_increment(&counters_->taken);
    return __shfl_sync(0xffffffff, taken, 0);
  }

  // By one lane.
  __device__ void find(int index, Tile& tile) const {
    tile.head = -1;
    if (num_tiles_ == 0) return;
    const int group = index / (side_by_side_ * num_tiles_), first = group * side_by_side_;
    if (first >= heads()) return;
    const int together = min(side_by_side_, heads() - first);
    const int within = index - first * num_tiles_, place = within / together;
    if (place >= num_tiles_) return;
    tile.head = first + within - place * together;
    const ListedTile* list = kSide == Side::kKeys ? params_.key_tiles : params_.query_tiles;
    const int4 words = __ldcg(reinterpret_cast<const int4*>(list + place));
    const Document document(params_, words.x, num_seqs_);
    tile.number = words.y, tile.before = words.z;
    tile.batch = document.batch;
    tile.query = document.query, tile.key = document.key;
    tile.q_rank = document.q_mixed ? document.rank : -1;
    tile.k_rank = document.k_mixed ? document.rank : -1;
    const int offset = kOfLayout ? document.before() : params_.offset + document.query - document.key;
    const Band band = {params_.left, params_.right, offset, document.q_len, document.k_len};
    tile.band = band;
    tile.first = tile.number * kHeld;
    if constexpr (kOfLayout && kSide == Side::kQueries) tile.first -= document.lead(kHeld);
    tile.count = min(kHeld, (kSide == Side::kKeys ? document.k_len : document.q_len) - tile.first);
    tile.met = tile.open = tile.held_queries = tile.held_keys = {0, 0};
    if (document.q_len == 0 || document.k_len == 0) return;
    tile.held_queries = band.queries_of(0, document.k_len - 1);
    tile.held_keys = band.keys_of(0, document.q_len - 1);
    const int last = tile.first + tile.count - 1;
    const Span met =
        kSide == Side::kKeys ? band.queries_of(tile.first, last) : band.keys_of(tile.first, last);
    if (met.begin < met.end) tile.met = {met.begin / kMet, ceil_div(met.end, kMet)};
    if (tile.count < kHeld || document.q_mixed || document.k_mixed) return;
    const Span open =
        kSide == Side::kKeys ? band.queries_of_all(tile.first, last) : band.keys_of_all(tile.first, last);
    tile.open = {ceil_div(open.begin, kMet), open.end / kMet};
  }

 private:
  __device__ int heads() const { return kSide == Side::kKeys ? params_.num_kv_heads : params_.num_heads; }

  const BackwardParams& params_;
  BackwardCounters* const counters_;
  const int num_tiles_, num_seqs_, side_by_side_;
};

// For a tile's own tokens, of a gradient that nothing adds to, what `word_of` token makes of two elements.
// For a whole warp.
template <Side kSide, typename WordOf>
__device__ inline void store_words(const BackwardParams& params, const Tile& tile, void* array,
                                   const Strides& strides, int dim, int lane, WordOf word_of) {
  const int token = kSide == Side::kKeys ? tile.key : tile.query;
  auto* to = static_cast<uint16_t*>(array) + tile.batch * strides.batch + tile.head * strides.head;
  for (int i = tile.first; i < tile.first + tile.count; ++i) {
    if (!tile.has<kSide>(params, i)) continue;
    const uint32_t word = word_of(i);
    for (int chunk = lane; chunk < dim / 8; chunk += 32) {
      reinterpret_cast<uint4*>(to + (token + i) * strides.token)[chunk] = make_uint4(word, word, word, word);
    }
  }
}
template <Side kSide>
__device__ inline void store_zeros(const BackwardParams& params, const Tile& tile, void* array,
                                   const Strides& strides, int dim, int lane) {
  store_words<kSide>(params, tile, array, strides, dim, lane, [](int) { return 0u; });
}

}  // namespace pallas_attn::attention::sm90::backward
