// Shared memory of the forward kernel: what a CTA holds of one shape, in bytes,
//
//   head_dim   queries   keys       values     sum, with what is told and the mbarriers
//         64   2 x 24K   4 x 12K    4 x 12K    145 KB
//         96   2 x 32K   3 x 32K    2 x 32K    225
//        128   2 x 32K   3 x 32K    2 x 32K    225
//    192/128   1 x 48K   2 x 48K    2 x 32K    209
//        192   1 x 48K   2 x 36K    2 x 36K    193
//        256   1 x 64K   2 x 32K    2 x 32K    193
//
// Of a cache of bytes key tiles are of 96 keys, of 48 at values of 192 and 256, two of keys and of values
// (four at heads of 64), and as many bytes as they are made of: 210 KB at heads of 128, 225 at 192/128.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/sm90/forward/config.h"
#include "attention/sm90/forward/key_tile.h"
#include "sm90/ring.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::attention::sm90 {

// What there is to do about a tile. Its key tiles are taken in turn from the last one on.
struct Tile {
  int kv_head;              // negative: there are no more tiles
  int batch, token;         // of its first query
  int tokens;               // queries
  int place;                // of its first query among the keys
  int seq;                  // of num_seqs
  int k_len;                // keys of the sequence
  int in_pages;             // that many in pages, the others in rows
  int k_begin;              // of its batch, where those begin
  int first_key, num_keys;  // key tiles, at least one
  // Key tiles [open_begin, open_end) are seen whole by all of its queries.
  int open_begin, open_end;
  float scale;        // of its logits
  float value_scale;  // of its results
  // Of the sequence's keys [seen_begin, seen_end) are seen by some query; others may hold NaN.
  int seen_begin, seen_end;
  bool is_lone;  // the sequence's only one
  int partial;   // the number of the partial result; negative: the result is final
  // Where not all queries (keys) between its first and last are the document's: the rank of those that are;
  // else negative.
  int q_rank, k_rank;
};

// The same where keys are blocks of a list: key tiles count through what it names, end to end. Key
// `whole_keys` of these is the first of a block that is not seen whole by all, key `past_keys` the first at
// the queries' own places. Where those stand in for bits, `place`, `k_len` and what is seen count likewise.
struct ListedTile : Tile {
  const int* blocks;
  int num_blocks, whole_keys, past_keys;
  // Of two rows that are united: how many queries are of the upper one, and a bit for each that cannot be
  // right.
  int upper_rows, bad;
  const uint32_t* bits;  // of the first block that is seen in part, the tile's first 64 queries; or null
};

// Of a cache of bytes: a key tile's keys, or its values, as they come, and what each is multiplied by where
// that differs in a tile.
template <int kStages_, int kKeys, int kPieces>
struct RawTiles {
  static constexpr int kStages = kStages_, kRawRowBytes = kPieces * kPieceDims;
  alignas(128) uint8_t bytes[kStages][kKeys * kRawRowBytes];
  float scales[kStages][kKeys];
  Ring<kStages, 1, 1> ring;
};
template <typename Shape, Feed kFeed>
struct RawPlan {};
template <typename Shape>
struct RawPlan<Shape, Feed::kConverted> {
  RawTiles<2, Shape::kKeys, Shape::kPieces> keys;
  RawTiles<Shape::kRawValueStages, Shape::kKeys, Shape::kValuePieces> values;
  float converted[Shape::kKeyStages][Shape::kKeys];  // scales of keys that are
};

template <typename Shape>
struct alignas(1024) SmemPlan {
  using QueryPiece = SwizzledPiece<Shape::kRows>;
  using Keys = KeyTile<Shape::kKeys, Shape::kPieces, Shape::kWoven>;
  using Values = KeyTile<Shape::kKeys, Shape::kValuePieces, Shape::kWoven>;

  QueryPiece sQ[Shape::kQueryStages][Shape::kPieces];
  Keys sK[Shape::kKeyStages];
  Values sV[Shape::kValueStages];

  // A math warpgroup's rows of the queries.
  __device__ auto& fragment_of(int stage, int piece, int warpgroup) {
    return reinterpret_cast<SwizzledPiece<kFragmentRows>&>(sQ[stage][piece][warpgroup * kFragmentRows]);
  }

  RawPlan<Shape, Shape::kFeed> raw;

  using Told = std::conditional_t<Shape::kListed, ListedTile, Tile>;
  Told tiles[kToldTiles];
  Ring<kToldTiles, 1, 1> told;
  Ring<Shape::kQueryStages, 1, 1> queries;
  Ring<Shape::kKeyStages, 1, 1> keys;
  Ring<Shape::kValueStages, 1, 1> values;
};

}  // namespace pallas_attn::attention::sm90
