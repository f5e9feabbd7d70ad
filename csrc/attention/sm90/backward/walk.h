// Which query tiles a key tile meets, and in which order a query tile's gradient is added up: by key tile,
// the first one first. A key tile therefore waits for those before it, which have been handed out before it,
// and never for one that may come later.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "common/math.h"

namespace pallas_attn::attention::sm90::backward {

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

 private:
  // What is at most so far before one place or behind another, of `length`.
  static __device__ __forceinline__ Span between(int first, int before, int last, int behind, int length) {
    const int begin = before < 0 ? 0 : min(max(first - before, 0), length);
    const int end = behind < 0 ? length : min(min(last, length) + behind + 1, length);
    return {begin, max(begin, end)};
  }
};

// A key tile, as its roles are told of it.
struct Tile {
  int batch;
  int kv_head;           // negative: there are no more tiles
  int number;            // of the sequence's key tiles
  int key, keys;         // its first key in the batch, and how many there are
  int query;             // the sequence's first query in the batch
  Band band;
  Span queries;          // query tiles it meets
  Span open;             // of those, the ones in which all queries see all keys
  int slot;              // of the first head's first query tile
  int slots_of_head;
};

// Its steps: head by head, the last query tile first. Under a causal mask all key tiles meet that one, and
// follow each other.
struct Step {
  int head, query;

  Step() = default;
  __device__ explicit Step(const Tile& tile) : head(0), query(tile.queries.end - 1) {}
  // False behind the last one.
  __device__ __forceinline__ bool advance(const Tile& tile, int group) {
    if (--query >= tile.queries.begin) return true;
    query = tile.queries.end - 1;
    return ++head < group;
  }
};

}  // namespace pallas_attn::attention::sm90::backward
