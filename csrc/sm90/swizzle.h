// Pieces of 64 columns of 16-bit elements in shared memory under the 128-byte swizzle, as the copy engine
// writes them and wgmma reads them: chunk c of 16 bytes of row r lies at chunk c ^ (r % 8).
#pragma once

#include <cstdint>

#include "ptx/shared.h"
#include "sm90/fragment.h"

namespace pallas_attn {
inline namespace sm90 {

constexpr int kPieceDims = 64;
constexpr uint32_t kRowBytes = kPieceDims * sizeof(uint16_t);
constexpr int kStepsPerPiece = kPieceDims / kStepDims;

// Starts at a multiple of 1024 bytes.
template <int kRows>
using SwizzledPiece = uint16_t[kRows][kPieceDims];

// For ldmatrix and stmatrix: a warp's 16 rows and 16 columns of a piece, where this lane's row of 16 bytes
// is. Lane l addresses row l % 8 of matrix l / 8; matrices 0, 1 are rows 0-7 and 8-15 of columns 0-7, 2 and 3
// of columns 8-15.
template <int kRows>
__device__ __forceinline__ uint32_t matrix_address(const SwizzledPiece<kRows>& piece, int warp, int lane,
                                                   int step) {
  const int row = warp * kWarpRows + (lane & 15);
  const int chunk = step * 2 + lane / 16;
  return ptx::shared_address(piece[row]) + ((chunk ^ (row & 7)) << 4);
}

}  // namespace sm90
}  // namespace pallas_attn
