// Shared memory of block-sparse prefill.
//
//   offset    bytes  what
//        0    65536  queries of two tiles, 2 pieces of 128 rows x 128 bytes each
//    65536    98304  three key tiles
//   163840    65536  values of two key tiles
//   229376      328  what is told of two tiles
//   229704      128  mbarriers
//   = 229832, of the 232448 a CTA can have (and 230400 with the struct's alignment)
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/sm90/config.h"
#include "sm90/ring.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::blocksparse::sm90 {

// What there is to do about a tile. Its key tiles are taken in turn from the last one on.
struct Tile {
  int head;        // negative: there are no more tiles
  int token;       // of its first row, which may lie before the array
  int begin, end;  // of its rows, those that are queries to be answered
  int num_keys;    // key tiles that it sees, at least one
  int own_keys;    // keys that its sequence has in the first of these if that is its own, else 0
  int key_token;   // where its sequence's keys begin
  int entry;       // of the columns, that of the first key tile; entries before it follow
  int part;        // which key tile of that block; those before it follow
};

struct alignas(1024) SmemPlan {
  using Piece = SwizzledPiece<kTileKeys>;

  Piece sQ[kSlots][kPieces];
  Piece sK[kKeyStages][kPieces];
  Piece sV[kValueStages][kPieces];

  // Queries of one half.
  __device__ auto& half_of(int slot, int piece, int half) {
    return reinterpret_cast<SwizzledPiece<kFragmentRows>&>(sQ[slot][piece][half * kFragmentRows]);
  }

  Tile tiles[kSlots];
  int columns[kSlots][32];  // of a tile's first entry and those before it
  // A slot is full when its tile is told, empty when those who read it have what they need, and all scores
  // are there.
  Ring<kSlots, 1, 1> told;
  uint64_t query_full[kSlots];
  Ring<kKeyStages, 1, 1> keys;
  Ring<kValueStages, 1, 1> values;
};

static_assert(offsetof(SmemPlan, sK) == 65536 && offsetof(SmemPlan, sV) == 163840);
static_assert(offsetof(SmemPlan, tiles) == 229376 && offsetof(SmemPlan, told) == 229704);
static_assert(sizeof(SmemPlan) == 230400 && sizeof(SmemPlan) <= kSmemLimit);

}  // namespace pallas_attn::blocksparse::sm90
