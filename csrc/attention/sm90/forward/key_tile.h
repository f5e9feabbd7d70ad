// How a key tile lies in shared memory, or its values.
#pragma once

#include <cstdint>

#include "ptx/wgmma.h"
#include "sm90/swizzle.h"

namespace pallas_attn::attention::sm90 {

// Eight rows of a piece follow each other, as swizzled. These blocks lie piece after piece; or woven, the
// pieces of eight rows side by side, so that one copy brings neighbouring rows whole, however many.
template <int kRows, int kPieces, bool kWoven>
struct alignas(1024) KeyTile {
  static constexpr uint32_t kBlockBytes = ptx::kSwizzleAtomBytes;
  // From a piece of a row to its next one, and from eight rows to the next.
  static constexpr uint32_t kPieceStride = kWoven ? kBlockBytes : kRows * kRowBytes;
  static constexpr uint32_t kEightStride = kWoven ? kPieces * kBlockBytes : kBlockBytes;

  uint16_t elements[kRows * kPieces * kPieceDims];

  // 128 bytes.
  __device__ __forceinline__ void* row_of(int piece, int row) {
    return reinterpret_cast<char*>(elements) + piece * kPieceStride + row * kRowBytes +
           row / 8 * (kEightStride - kBlockBytes);
  }
  // Where chunk `chunk` of 16 bytes of a row lies, counted through its pieces.
  __device__ __forceinline__ uint32_t chunk_of(int chunk, int row) {
    return ptx::shared_address(row_of(chunk / 8, row)) + (((chunk ^ row) & 7) << 4);
  }
};

}  // namespace pallas_attn::attention::sm90
