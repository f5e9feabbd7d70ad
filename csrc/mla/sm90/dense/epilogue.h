// Writing a tile's result: final for requests of one split, float32 partials otherwise.
#pragma once

#include "common/math.h"
#include "mla/sm90/dense/softmax.h"
#include "mla/sm90/dense/tile_walker.h"
#include "ptx/cache.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace pallas_attn::mla::sm90 {

// What a thread of a math warpgroup holds of a tile behind its last product: rows not divided by their sums
// yet.
struct TileResult {
  SplitTile tile;
  RowState state;  // sums complete
  float rO[kOutRegisters];
};

// What the rows' sums and maxima come to.
struct RowEnds {
  float factor[kRowsPerThread];
  float lse2[kRowsPerThread];

  __device__ explicit RowEnds(const RowState& state) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const bool empty = state.sum[i] == 0.0f;  // false for NaN, which must survive
      factor[i] = empty ? 0.0f : 1.0f / state.sum[i];
      lse2[i] = empty ? -INFINITY : state.maximum[i] + log2f(state.sum[i]);
    }
  }
};

// Rows of a tile that one warp holds.
constexpr int kWarpRows = kTileRows / kSideWarps;

// Where a warpgroup's half of a tile belongs.
struct TilePlace {
  int kv_head;
  int row_tile;
  int side;

  __device__ int first_row() const { return row_tile * kTileRows; }
  // Rows of the tile that there are.
  __device__ int rows_left(const DecodeParams& params) const { return params.rows() - first_row(); }
  // Of the output, or of the partial results.
  __device__ int64_t row(const DecodeParams& params, int request_or_slot) const {
    return (static_cast<int64_t>(request_or_slot) * params.num_kv_heads + kv_head) * params.rows() +
           first_row();
  }
  // This side's columns of one.
  __device__ float* partial_row(const DecodeParams& params, int slot, int row_in_tile) const {
    return params.partial_out + (row(params, slot) + row_in_tile) * kLatentDim + side * kHalfDims;
  }
};

// Transposes a 4 x 4 of 32-bit words held by the four lanes of a quad: word j of lane i goes to word i of
// lane j.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&v)[4], int in_quad) {
  const bool odd = in_quad & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffff, odd ? v[0] : v[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffff, odd ? v[2] : v[3], 1);
  (odd ? v[0] : v[1]) = a;
  (odd ? v[2] : v[3]) = b;
  const bool high = in_quad & 2;
  const uint32_t c = __shfl_xor_sync(0xffffffff, high ? v[0] : v[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffff, high ? v[1] : v[3], 2);
  (high ? v[0] : v[2]) = c;
  (high ? v[1] : v[3]) = d;
}

// A thread's accumulators are two columns out of every eight; after the exchange it has eight neighbours, one
// 16-byte store, and a quad writes 64 bytes of a row.
template <typename Element>
__device__ __forceinline__ void store_final(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                            const float (&factor)[kRowsPerThread], char* tile_out, int side,
                                            int rows_left) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    char* row_out = tile_out + static_cast<int64_t>(row) * kLatentDim * 2 + side * kHalfDims * 2;
#pragma unroll
    for (int group = 0; group < kHalfDims / 32; ++group) {
      uint32_t v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = (group * 4 + j) * 4 + i * 2;
        v[j] = ElementTraits<Element>::pack(rO[r] * factor[i], rO[r + 1] * factor[i]);
      }
      transpose_in_quad(v, at.in_quad);
      if (row < rows_left) {
        *reinterpret_cast<uint4*>(row_out + group * 64 + at.in_quad * 16) =
            make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

// Two columns of a quad's lanes make one 32-byte sector of float32 as they are. `store(float*, float2)` says
// how.
template <typename Store>
__device__ __forceinline__ void store_partial(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                              const float (&factor)[kRowsPerThread],
                                              const DecodeParams& params, const TilePlace& place, int slot,
                                              Store store) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= place.rows_left(params)) continue;
    float* row_out = place.partial_row(params, slot, row) + at.in_quad * 2;
#pragma unroll
    for (int group = 0; group < kHalfDims / 8; ++group) {
      const int r = group * 4 + i * 2;
      store(row_out + group * 8, make_float2(rO[r] * factor[i], rO[r + 1] * factor[i]));
    }
  }
}

// Through shared memory and the copy engine, a quarter of the instructions of store_final. Each warp stages
// its own 16 rows in the query's place, so nobody may need the query any more.
template <typename Element>
__device__ __forceinline__ void stage_final(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                            int lane, const float (&factor)[kRowsPerThread], SmemPlan& smem,
                                            const CUtensorMap& out_map, const TilePlace& place,
                                            int request_head) {
#pragma unroll
  for (int step = 0; step < kHalfDims / kStepDims; ++step) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = step * 8 + j * 2;
      const float scale = factor[FragmentPosition::row_of(r)];
      v[j] = ElementTraits<Element>::pack(rO[r] * scale, rO[r + 1] * scale);
    }
    const SmemPlan::Piece& piece = smem.sQ[place.side * kHalfPieces + step / kStepsPerPiece];
    ptx::store_matrix_x4(operand_address(piece, at.warp, lane, step % kStepsPerPiece), v[0], v[1], v[2],
                         v[3]);
  }
  ptx::fence_async_shared();
  __syncwarp();
  if (lane != 0) return;
  // What comes next reads it. And while it stays in the L2, its writes do not disturb the reads of pages.
  const uint64_t policy = ptx::l2_evict_last_policy();
#pragma unroll 1
  for (int piece = place.side * kHalfPieces; piece < (place.side + 1) * kHalfPieces; ++piece) {
    // Rows past the request's last are outside the map, which the copy engine leaves out.
    ptx::tma_store_3d(&out_map, smem.sQ[piece][at.warp * kWarpRows], policy, piece * kPieceDims,
                      place.first_row() + at.warp * kWarpRows, request_head);
  }
  ptx::close_stores();
  ptx::wait_until_stores_have_read();
}

// A row of the side's 256 columns is one run of bytes to the copy engine, where a warp's stores and loads
// would be eight crumbs of 32 bytes. Worth it for all rows of a tile behind which everybody waits, not for
// few.
__device__ __forceinline__ void stage_partial(const float (&rO)[kOutRegisters], const FragmentPosition& at,
                                              int lane, const float (&factor)[kRowsPerThread], SmemPlan& smem,
                                              const DecodeParams& params, const TilePlace& place, int slot) {
  PartialStage& stage = smem.partial_stage();
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    float* row = &stage.rows[place.side][at.row(i)][at.in_quad * 2];
#pragma unroll
    for (int group = 0; group < kHalfDims / 8; ++group) {
      const int r = group * 4 + i * 2;
      *reinterpret_cast<float2*>(row + group * 8) = make_float2(rO[r] * factor[i], rO[r + 1] * factor[i]);
    }
  }
  ptx::fence_async_shared();
  __syncwarp();
  const int row = at.warp * kWarpRows + lane;
  if (lane >= kWarpRows || row >= place.rows_left(params)) return;
  ptx::bulk_store(place.partial_row(params, slot, row), stage.rows[place.side][row],
                  kHalfDims * sizeof(float));
  ptx::close_stores();
  ptx::wait_until_stores_are_done();
}

// Adds the other splits' partial results to the tile.
__device__ __forceinline__ void add_partials(const DecodeParams& params, const TilePlace& place,
                                             const FragmentPosition& at, int lane, SmemPlan& smem,
                                             TileResult& result) {
  PartialStage& stage = smem.partial_stage();
  const int rows = min(place.rows_left(params) - at.warp * kWarpRows, kWarpRows);
  if (rows <= 0) return;
  uint64_t* full = &smem.partial_full[place.side][at.warp];
  ptx::fence_async_global();
  for (int split = 1; split < result.tile.kept_splits; ++split) {
    const int slot = min(result.tile.partial_slot + split, params.num_slots() - 1);
    if (lane == 0) ptx::mbarrier_arrive_expect_bytes(full, rows * kHalfDims * sizeof(float));
    __syncwarp();
    if (lane < rows) {
      const int row = at.warp * kWarpRows + lane;
      ptx::bulk_load(stage.rows[place.side][row], place.partial_row(params, slot, row),
                     kHalfDims * sizeof(float), full);
    }
    float lse2[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      // Rows that do not exist add something that is never stored.
      const int row = at.row(i);
      lse2[i] =
          row < place.rows_left(params) ? params.partial_lse2[place.row(params, slot) + row] : -INFINITY;
    }
    ptx::mbarrier_wait(full, (split - 1) & 1);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      float& maximum = result.state.maximum[i];
      const float top = fmaxf(maximum, lse2[i]);
      const float own = exp2_fast(maximum - top), other = exp2_fast(lse2[i] - top);
      maximum = top;
      result.state.sum[i] = result.state.sum[i] * own + other;
      const float* row = &stage.rows[place.side][at.row(i)][at.in_quad * 2];
#pragma unroll
      for (int group = 0; group < kHalfDims / 8; ++group) {
        const float2 v = *reinterpret_cast<const float2*>(row + group * 8);
        const int r = group * 4 + i * 2;
        result.rO[r] = result.rO[r] * own + v.x * other;
        result.rO[r + 1] = result.rO[r + 1] * own + v.y * other;
      }
    }
    if (lane < rows) {
      char* row = reinterpret_cast<char*>(place.partial_row(params, slot, at.warp * kWarpRows + lane));
#pragma unroll
      for (int line = 0; line < kHalfDims * 4 / ptx::kLineBytes; ++line)
        ptx::discard_line(row + line * ptx::kLineBytes);
    }
    // The next one overwrites what was just read.
    ptx::fence_async_shared();
    __syncwarp();
  }
}

// Where the tile is a request of its own the log-sum-exp is final too.
__device__ __forceinline__ void store_lse(const DecodeParams& params, const TilePlace& place,
                                          const SplitTile& tile, const FragmentPosition& at,
                                          const float (&lse2)[kRowsPerThread]) {
  if (place.side != 0 || at.in_quad != 0) return;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = at.row(i);
    if (row >= place.rows_left(params)) continue;
    if (tile.partial_slot < 0) {
      *params.lse_of(tile.request, place.kv_head, place.first_row() + row) = lse2[i] * kLn2;
    } else {
      params.partial_lse2[place.row(params, tile.partial_slot) + row] = lse2[i];
    }
  }
}

// While the next tile's query and pages are on their way.
template <typename Element>
__device__ __forceinline__ void store_tile(const DecodeParams& params, const TilePlace& place,
                                           const SplitTile& tile, const FragmentPosition& at,
                                           const RowState& state, const float (&rO)[kOutRegisters]) {
  const RowEnds ends(state);
  const int rows_left = place.rows_left(params);
  if (tile.partial_slot < 0) {
    const int64_t offset = place.row(params, tile.request) * kLatentDim * 2;
    store_final<Element>(rO, at, ends.factor, static_cast<char*>(params.out) + offset, place.side, rows_left);
  } else {
    // Its reader comes at the end and discards it. Until then it should stay in the L2: in device memory the
    // few writes among all the reads of pages cost several times their bytes.
    const uint64_t policy = ptx::l2_evict_last_policy();
    store_partial(rO, at, ends.factor, params, place, tile.partial_slot,
                  [=](float* to, float2 v) { ptx::store_with_policy(to, v, policy); });
  }
  store_lse(params, place, tile, at, ends.lse2);
}

// When nothing follows. `awaited`: other CTAs wait for a partial result.
template <typename Element>
__device__ __forceinline__ void store_last_tile(const DecodeParams& params, const TilePlace& place,
                                                const TileResult& result, const FragmentPosition& at,
                                                int lane, bool awaited, SmemPlan& smem,
                                                const CUtensorMap& out_map) {
  const SplitTile& tile = result.tile;
  const RowEnds ends(result.state);
  const int rows_left = place.rows_left(params);
  if (at.warp * kWarpRows >= rows_left) return;
  if (tile.partial_slot < 0) {
    stage_final<Element>(result.rO, at, lane, ends.factor, smem, out_map, place,
                         tile.request * params.num_kv_heads + place.kv_head);
  } else if (awaited) {
    stage_partial(result.rO, at, lane, ends.factor, smem, params, place, tile.partial_slot);
  } else {
    // Few rows, read at once by the merging kernel: the policy would cost more than it gains.
    store_partial(result.rO, at, ends.factor, params, place, tile.partial_slot,
                  [](float* to, float2 v) { *reinterpret_cast<float2*>(to) = v; });
  }
  store_lse(params, place, tile, at, ends.lse2);
}

}  // namespace pallas_attn::mla::sm90
