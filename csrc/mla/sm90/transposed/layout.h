// Which bytes of a token and which dimensions of the query meet in a product. What a product sums over may be
// in any order if both operands have the same one, so it is the order in which a thread can load most at
// once: of a block of 128 bytes, lane p of a quad has bytes [32 p, 32 p + 32), in two chunks of 16.
//
// A step of 16 takes four bytes of each lane: those are columns 2 p, 2 p + 1, 2 p + 8 and 2 p + 9 of the
// fragment. The rotary block, 64 numbers of two bytes, is cut up in the same way.
//
// Rows of 656 bytes are 4 banks apart modulo 32, so eight lanes that load 16 bytes each (two tokens, four
// lanes of a quad) never meet in a bank.
#pragma once

#include "common/host_device.h"
#include "mla/sm90/transposed/config.h"

namespace pallas_attn::mla::sm90::transposed {

// Where lane `pair` of a quad finds chunk `half` of a block, in a token.
PALLAS_ATTN_HOST_DEVICE constexpr int chunk_at(int block, int half, int pair) {
  return (block < kBlocks ? block * kScaleGroup : kRopeAt) + pair * 32 + half * 16;
}

// The query's dimension that lies in word `word` (two numbers) of chunk `chunk` of a piece's row: piece
// 2 * block + half, steps of two chunks.
PALLAS_ATTN_HOST_DEVICE constexpr int query_dim(int piece, int chunk, int word) {
  return piece < kLatentPieces ? piece / 2 * kScaleGroup + word * 32 + piece % 2 * 16 + chunk * 2
                               : kLatentDim + word * 16 + chunk * 2;
}

// Where a token's scale lies among a page's: the four that a thread needs in a step (values.h) side by side,
// for one load.
PALLAS_ATTN_HOST_DEVICE constexpr int place_of_scale(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// In the place of tokens that are not there, by a warp: 0 times what may lie there could be NaN. Before the
// copy engine writes there again the warp has to fence.
__device__ __forceinline__ void clear_tokens(char* first, int count, int lane) {
  auto* chunks = reinterpret_cast<uint4*>(first);
  for (int i = lane; i < count * static_cast<int>(kTokenBytes / sizeof(uint4)); i += 32) {
    chunks[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace pallas_attn::mla::sm90::transposed
