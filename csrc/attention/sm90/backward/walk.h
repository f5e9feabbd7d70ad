// Which query tiles a key tile meets, and in which order a query tile's gradient is added up: by key tile,
// the first one first. A key tile therefore waits for those before it, which have been handed out before it,
// and never for one that may come later.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "common/math.h"

namespace pallas_attn::attention::sm90::backward {

enum class Side { kKeys, kQueries };
constexpr Side other(Side side) { return side == Side::kKeys ? Side::kQueries : Side::kKeys; }

// Tokens or tiles [begin, end).
struct Span {
  int begin, end;
};

// Of a sequence of q_len queries and k_len keys: query i sees keys i + offset - left to i + offset + right;
// negative: no bound. Lengths, bounds and offset are at most 2^30.
struct Band {
  int left, right, offset;
  int q_len, k_len;

  // Queries that see some of the keys `first` to `last`.
  __device__ __forceinline__ Span queries_of(int first, int last) const {
    return between(first - offset, right, last - offset, left, q_len);
  }
  // Those that see all of them.
  __device__ __forceinline__ Span queries_of_all(int first, int last) const {
    return queries_of(last, first);
  }
  // Keys that some of the queries `first` to `last` see.
  __device__ __forceinline__ Span keys_of(int first, int last) const {
    return between(first + offset, left, last + offset, right, k_len);
  }
  // Those that all of them see.
  __device__ __forceinline__ Span keys_of_all(int first, int last) const { return keys_of(last, first); }

 private:
  // What is at most so far before one place or behind another, of `length`.
  static __device__ __forceinline__ Span between(int first, int before, int last, int behind, int length) {
    const int begin = before < 0 ? 0 : min(max(first - before, 0), length);
    const int end = behind < 0 ? length : min(min(last, length) + behind + 1, length);
    return {begin, max(begin, end)};
  }
};

// A tile that a CTA holds, as its roles are told of it: of keys, that meets tiles of queries, or the other
// way round. Queries and keys are counted from the sequence's first.
struct Tile {
  int batch;
  int head;            // of the side that is held; negative: there are no more tiles
  int number, before;  // as in the list
  int first, count;    // its first token, and how many there are
  int query, key;      // the sequence's first query and key in the batch
  Band band;
  Span met;           // tiles of the other side that it meets
  Span open;          // of those, the ones in which all pairs count
  Span held_queries;  // that see some key of the sequence; others may hold NaN
  Span held_keys;     // that some query sees
  // Where not all queries (keys) between its first and last are the document's: the rank of those that are;
  // else negative.
  int q_rank, k_rank;

  // Whether token i of a side is the sequence's, and whether it is and counts at all.
  template <Side kSide>
  __device__ __forceinline__ bool has(const BackwardParams& params, int i) const {
    if constexpr (kSide == Side::kKeys) {
      return i < band.k_len && is_own(params.k_ranks, k_rank, batch * int64_t{params.kv_len} + key + i);
    } else {
      // A layout's first tile begins in front of the first query.
      return static_cast<uint32_t>(i) < static_cast<uint32_t>(band.q_len) &&
             is_own(params.q_ranks, q_rank, batch * int64_t{params.q_len} + query + i);
    }
  }
  template <Side kSide>
  __device__ __forceinline__ bool holds(const BackwardParams& params, int i) const {
    const Span& held = kSide == Side::kKeys ? held_keys : held_queries;
    return i >= held.begin && i < held.end && has<kSide>(params, i);
  }
  // Whether of tokens [first, first + count) some must be cleared; what lies behind an array's end is zero.
  template <Side kSide>
  __device__ __forceinline__ bool has_others(const BackwardParams& params, int first, int count) const {
    const Span& held = kSide == Side::kKeys ? held_keys : held_queries;
    const int rank = kSide == Side::kKeys ? k_rank : q_rank;
    const int end = held.end + (kSide == Side::kKeys ? key : query);
    return rank >= 0 || first < held.begin ||
           (first + count > held.end && end < (kSide == Side::kKeys ? params.kv_len : params.q_len));
  }

 private:
  static __device__ __forceinline__ bool is_own(const int* ranks, int rank, int64_t place) {
    return rank < 0 || __ldg(ranks + place) == rank;
  }
};

// A tile's steps: head by head, the last query tile first. Under a causal mask all key tiles meet that one,
// and follow each other.
struct Step {
  int head, met;

  Step() = default;
  __device__ explicit Step(const Span& tiles) : head(0), met(tiles.end - 1) {}
  // Its first token among the sequence's, of tiles of so many.
  __device__ __forceinline__ int first(const Tile&, int tokens) const { return met * tokens; }
  // False behind the last one of `group` heads.
  __device__ __forceinline__ bool advance(const Span& tiles, int group) {
    if (--met >= tiles.begin) return true;
    met = tiles.end - 1;
    return ++head < group;
  }
};

// Heads of the other side that a tile meets.
template <Side kSide>
__device__ __forceinline__ int met_heads(const BackwardParams& params) {
  return kSide == Side::kKeys ? params.group : 1;
}

// Those of either side.
template <Side kSide>
struct BandSteps : Step {
  __device__ BandSteps(const BackwardParams&, const Tile& tile) : Step(tile.met) {}
  __device__ __forceinline__ bool advance(const BackwardParams& params, const Tile& tile) {
    return Step::advance(tile.met, met_heads<kSide>(params));
  }
};

}  // namespace pallas_attn::attention::sm90::backward
