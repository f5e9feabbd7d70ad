// What the two math warpgroups share: their state, and handing buffers back to the producer.
#pragma once

#include "mla/sm90/dense/epilogue.h"
#include "mla/sm90/dense/gemm.h"
#include "mla/sm90/dense/named_barriers.h"
#include "mla/sm90/dense/softmax.h"
#include "mla/sm90/dense/tile_walker.h"

namespace pallas_attn::mla::sm90 {

enum Side { kLeft = 0, kRight = 1 };

// The left warpgroup owns even pages (of a tile, counted from its first) and the left 256 columns of the
// output; the right one odd pages and the right columns. The owner of a page computes its scores and softmax;
// both multiply.
template <typename Element, Side kSide>
class Consumer {
 protected:
  static constexpr int kOwnBuffer = kSide;

  __device__ Consumer(const DecodeParams& params, SmemPlan& smem, TileResult& last, int kv_head, int row_tile,
                      int thread)
      : params_(params),
        smem_(smem),
        last_(last),
        state_(last.state),
        rO_(last.rO),
        kv_head_(kv_head),
        row_tile_(row_tile),
        thread_(thread),
        lane_(thread % 32),
        at_(thread),
        scale_log2_(params.scale * kLog2E) {}

  // One lane of every warp says for its warp that the part is no longer read.
  __device__ __forceinline__ void release(int buffer, BufferPart part) {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(&smem_.kv_empty[buffer][part]);
  }

  __device__ __forceinline__ void release_query() {
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(&smem_.query_empty);
  }

  // Waits for the tile's query. A tile without pages has one too, which is given back at once.
  __device__ __forceinline__ void begin_tile(const SplitTile& tile) {
    ptx::mbarrier_wait(&smem_.query_full, query_phase_);
    query_phase_ ^= 1;
    load_query_registers(rQ_, smem_, at_.warp, lane_);
    if (tile.num_pages() == 0) release_query();
    state_.reset();
#pragma unroll
    for (int r = 0; r < kOutRegisters; ++r) rO_[r] = 0.0f;
  }

  // Called by a page's owner when its scores are complete: softmax, and everything rare around it.
  __device__ __forceinline__ void finish_scores(const SplitTile& tile, int page,
                                                float (&rescale)[kRowsPerThread]) {
    ptx::wgmma_touch(rS_);
    const int first_token = page * kTileTokens;
    if (first_token + kTileTokens > tile.seq_len - (params_.causal ? params_.query_len - 1 : 0)) {
      mask_page(tile, first_token);
    }
    if (first_token + kTileTokens > tile.seq_len) {
      clear_tail(smem_, kOwnBuffer, tile.seq_len - first_token, thread_);
      ptx::named_barrier_sync(kSide == kLeft ? kLeftTailCleared : kRightTailCleared, kSideThreads);
    }
    // A bad page makes every probability NaN.
    const float scale_log2 = smem_.bad_page[kOwnBuffer] ? NAN : scale_log2_;
    softmax_page<Element>(rS_, scale_log2, state_, rescale, rP_);
  }

  // Query i of a request sees the keys up to its own position.
  __device__ __forceinline__ void mask_page(const SplitTile& tile, int first_token) {
    int visible[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int query = (row_tile_ * kTileRows + at_.row(i)) / params_.group;
      visible[i] = params_.causal ? tile.seq_len - params_.query_len + 1 + query : tile.seq_len;
    }
    mask_scores(rS_, at_, first_token, visible);
  }

  __device__ __forceinline__ void publish(const float (&rescale)[kRowsPerThread]) {
    publish_page(smem_, at_, lane_, kOwnBuffer, rP_, state_, rescale);
    announce(kSide == kLeft ? kEvenProbabilitiesReady : kOddProbabilitiesReady);
  }

  // The products read registers written above.
  __device__ __forceinline__ void multiply_own(bool accumulate) {
    ptx::wgmma_touch(rO_);
    ptx::wgmma_fence();
    issue_values_own<Element>(rO_, rP_, smem_, kOwnBuffer, kSide, accumulate);
    ptx::wgmma_commit();
  }

  // Waits for the other warpgroup's page, adjusts to its maximum and multiplies by its probabilities.
  __device__ __forceinline__ void await_other(float (&rescale)[kRowsPerThread]) {
    await(kSide == kLeft ? kOddProbabilitiesReady : kEvenProbabilitiesReady);
    adopt_page(smem_, at_, 1 - kOwnBuffer, state_, rescale);
  }

  __device__ __forceinline__ void multiply_other() {
    ptx::wgmma_touch(rO_);
    ptx::wgmma_fence();
    issue_values_shared<Element>(rO_, smem_, 1 - kOwnBuffer, kSide);
    ptx::wgmma_commit();
  }

  // Behind a tile's products. The last tile's result stays in registers; what becomes of it is up to the
  // kernel.
  __device__ __forceinline__ void end_tile(const SplitTile& tile, bool is_last) {
    ptx::wgmma_touch(rO_);
    complete_sums(tile);
    if (is_last) {
      last_.tile = tile;
    } else {
      store_tile<Element>(params_, {kv_head_, row_tile_, kSide}, tile, at_, state_, rO_);
    }
  }

  // The row sums of the two warpgroups are of different pages but relative to the same maximum.
  __device__ __forceinline__ void complete_sums(const SplitTile& tile) {
    if (tile.bad_length && tile.num_pages() == 0) state_.sum[0] = state_.sum[1] = NAN;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float total = quad_reduce(state_.sum[i], [](float a, float b) { return a + b; });
      if (at_.in_quad == 0) smem_.row_sum[tile_parity_][kSide][at_.row(i)] = total;
    }
    ptx::named_barrier_sync_unaligned(kRowSumsReady, kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      // Left plus right in both warpgroups, so that both divide by the same number.
      state_.sum[i] =
          smem_.row_sum[tile_parity_][kLeft][at_.row(i)] + smem_.row_sum[tile_parity_][kRight][at_.row(i)];
    }
    // The other warpgroup may still be reading when this one ends its next tile, not the one after.
    tile_parity_ ^= 1;
  }

  const DecodeParams& params_;
  SmemPlan& smem_;
  TileResult& last_;
  RowState& state_;
  float (&rO_)[kOutRegisters];
  const int kv_head_;
  const int row_tile_;
  const int thread_;
  const int lane_;
  const FragmentPosition at_;
  const float scale_log2_;

  uint32_t query_phase_ = 0;
  uint32_t kv_phase_ = 0;
  int tile_parity_ = 0;

  QueryRegisters rQ_;
  float rS_[kScoreRegisters];
  uint32_t rP_[kTokenSteps][4];
};

}  // namespace pallas_attn::mla::sm90
