// The right warpgroup: scores of odd pages, right half of the output.
#pragma once

#include "mla/sm90/dense/consumer.h"

namespace pallas_attn::mla::sm90 {

template <typename Element>
class RightWarpgroup : Consumer<Element, kRight> {
  using Base = Consumer<Element, kRight>;

 public:
  __device__ RightWarpgroup(const DecodeParams& params, SmemPlan& smem, TileResult& last, int kv_head,
                            int row_tile, int thread)
      : Base(params, smem, last, kv_head, row_tile, thread) {}

  __device__ __forceinline__ void run(int part) {
    TileWalker walker(this->params_, part);
    SplitTile next;
    bool more = walker.next(next);
    while (more) {
      const SplitTile tile = next;
      this->begin_tile(tile);
      if (tile.num_pages() == 1) this->release_query();
      int page = tile.page_begin;
      for (; page + 1 < tile.page_end; page += 2) {
        finish_own_product(page > tile.page_begin);
        // The last scores of this warpgroup are those of the last odd page.
        process_pair(tile, page + 1, page + 3 >= tile.page_end);
      }
      finish_own_product(page > tile.page_begin);
      if (page < tile.page_end) process_last_even_page();
      // Its loads travel while this tile is written.
      more = walker.next(next);
      this->end_tile(tile, !more);
    }
  }

 private:
  // The odd buffer's right half can only be refilled after this, so it comes before waiting for the refill.
  __device__ __forceinline__ void finish_own_product(bool running) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(this->rO_);
    if (running) this->release(1, kRightPart);
  }

  // An even page, computed by the other warpgroup, and the odd page after it. Scores of the odd page are
  // queued first, so that the tensor cores have them while the other warpgroup is in its softmax; the product
  // with the even page is queued behind them and runs during this warpgroup's softmax.
  __device__ __forceinline__ void process_pair(const SplitTile& tile, int odd_page, bool last_scores) {
    ptx::wgmma_touch(this->rS_);
    issue_scores<Element, kHalfPieces, kHalfPieces>(this->rS_, this->rQ_, this->smem_, 1, this->kv_phase_,
                                                    false);
    issue_scores<Element, 0, kHalfPieces>(this->rS_, this->rQ_, this->smem_, 1, this->kv_phase_, true);
    issue_scores<Element, kRopePiece, 1>(this->rS_, this->rQ_, this->smem_, 1, this->kv_phase_, true);
    ptx::wgmma_commit();
    this->kv_phase_ ^= 1;

    float rescale[kRowsPerThread];
    this->await_other(rescale);
    rescale_out(this->rO_, rescale);
    this->multiply_other();

    ptx::wgmma_wait<1>();
    if (last_scores) this->release_query();
    this->finish_scores(tile, odd_page, rescale);
    this->publish(rescale);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(this->rO_);
    this->release(0, kRightPart);
    rescale_out(this->rO_, rescale);
    this->multiply_own(true);
  }

  __device__ __forceinline__ void process_last_even_page() {
    float rescale[kRowsPerThread];
    this->await_other(rescale);
    rescale_out(this->rO_, rescale);
    this->multiply_other();
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(this->rO_);
    this->release(0, kRightPart);
  }
};

}  // namespace pallas_attn::mla::sm90
