// What the feeders of the dense kernel's math warpgroups have in common: rows, the query's tile, the buffers.
#pragma once

#include "mla/sm90/dense/query_loader.h"
#include "mla/sm90/sparse/listed_rows.h"
#include "mla/sm90/sparse/smem_plan.h"
#include "ptx/async_copy.h"

namespace pallas_attn::mla::sm90 {

template <int kTokenBytes>
class RowFinder : protected ListedRows<kTokenBytes> {
 public:
  __device__ RowFinder(const SparseParams& params, SparsePlan& smem, int warp)
      : ListedRows<kTokenBytes>(params, warp), smem_(smem) {}

 protected:
  using Rows = ListedRows<kTokenBytes>;
  using Rows::kWarpTokens, Rows::lane_, Rows::params_, Rows::row_at, Rows::warp_;

  // As ListedRows::walk; the query is loaded besides.
  template <typename Feed>
  __device__ __forceinline__ void walk(const CUtensorMap& query_map, int part, Feed feed) {
    QueryLoader query(params_, query_map, smem_, 0, blockIdx.x, lane_);
    Rows::walk(
        part,
        [&](int token) {
          if (warp_ == 0) query.load(token);
        },
        feed);
  }

  __device__ __forceinline__ void tell_held(Parity buffer, int own_row) {
    Rows::tell_held(smem_, buffer, own_row);
  }

  // Into the L2, of a pool of bytes: lane l has the row of token l % kTokens. Rows may begin inside of a
  // line, but no line has less than 16 bytes of one.
  template <int kTokens>
  __device__ __forceinline__ void prefetch(int row) const {
    constexpr int kLines = (kTokenBytes + ptx::kLineBytes - 1) / ptx::kLineBytes;
    constexpr int kRowLanes = 32 / kTokens;
    const char* from = row_at(row) + lane_ / kTokens * ptx::kLineBytes;
#pragma unroll
    for (int line = 0; line < kLines; line += kRowLanes) {
      if (row >= 0 && line + lane_ / kTokens < kLines) ptx::prefetch_line(from + line * ptx::kLineBytes);
    }
  }

  // The warp's rows of the rotary piece of a pool of bytes, eight lanes a token.
  __device__ __forceinline__ void copy_rope(Parity buffer, int own_row) {
    const int token = lane_ / 8, chunk = lane_ % 8;
    const uint32_t first = ptx::shared_address(smem_.sK[buffer][kRopePiece][warp_ * kWarpTokens + token]);
    const uint32_t to = first + ((chunk ^ token) << 4);
#pragma unroll
    for (int i = 0; i < kWarpTokens; i += 4) {
      const int row = __shfl_sync(0xffffffff, own_row, i + token);
      ptx::copy_async((to ^ (i % 8 << 4)) + i * kRowBytes, row_at(row) + kRopeAt + chunk * 16, row >= 0);
    }
    ptx::arrive_behind_copies(&smem_.pages.full[buffer][kRopePiece]);
  }

  SparsePlan& smem_;
  Phases<kBuffers> phases_;
};

}  // namespace pallas_attn::mla::sm90
