// The left warpgroup: scores of even pages, left half of the output.
#pragma once

#include "mla/sm90/dense/consumer.h"

namespace pallas_attn::mla::sm90 {

template <typename Element>
class LeftWarpgroup : Consumer<Element, kLeft> {
  using Base = Consumer<Element, kLeft>;

 public:
  __device__ LeftWarpgroup(const DecodeParams& params, SmemPlan& smem, TileResult& last, int kv_head,
                           int row_tile, int thread)
      : Base(params, smem, last, kv_head, row_tile, thread) {}

  // The loop turns at the point where only this warpgroup's own product is running: ptxas gives up on
  // overlapping anything when a product that is later waited for by count crosses a loop's back edge.
  __device__ __forceinline__ void run(int part) {
    TileWalker walker(this->params_, part);
    SplitTile next;
    bool more = walker.next(next);
    while (more) {
      const SplitTile tile = next;
      this->begin_tile(tile);
      if (tile.num_pages() > 0) {
        process_even_page<false>(tile, tile.page_begin);
        int page = tile.page_begin + 1;
        for (; page + 1 < tile.page_end; page += 2) {
          process_odd_page();
          process_even_page<true>(tile, page + 1);
        }
        const bool ends_odd = page < tile.page_end;
        if (ends_odd) process_odd_page();
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(this->rO_);
        this->release(ends_odd ? 1 : 0, kLeftPart);
      }
      // Its loads travel while this tile is written.
      more = walker.next(next);
      this->end_tile(tile, !more);
    }
  }

 private:
  // On exit the product with this page is running.
  template <bool kOddProductRunning>
  __device__ __forceinline__ void process_even_page(const SplitTile& tile, int page) {
    ptx::wgmma_touch(this->rS_);
    if constexpr (kOddProductRunning) {
      // Handing the odd buffer back must not wait for the rest of this page to arrive, yet the tensor cores
      // should have something to do meanwhile: hence here.
      issue_scores<Element, 0, 2>(this->rS_, this->rQ_, this->smem_, 0, this->kv_phase_, false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_touch(this->rO_);
      this->release(1, kLeftPart);
      issue_scores<Element, 2, kPieces - 2>(this->rS_, this->rQ_, this->smem_, 0, this->kv_phase_, true);
    } else {
      issue_scores<Element, 0, kPieces>(this->rS_, this->rQ_, this->smem_, 0, this->kv_phase_, false);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    this->kv_phase_ ^= 1;
    if (page + 2 >= tile.page_end) this->release_query();

    float rescale[kRowsPerThread];
    this->finish_scores(tile, page, rescale);
    this->publish(rescale);
    rescale_out(this->rO_, rescale);
    this->multiply_own(kOddProductRunning);
  }

  // On entry the product with the even page before is running, on exit the one with this page.
  __device__ __forceinline__ void process_odd_page() {
    // Handed back before waiting for the other warpgroup: every moment earlier is a moment the next even page
    // arrives sooner, and its arrival is what the loop waits for.
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(this->rO_);
    this->release(0, kLeftPart);
    float rescale[kRowsPerThread];
    this->await_other(rescale);
    rescale_out(this->rO_, rescale);
    this->multiply_other();
  }
};

}  // namespace pallas_attn::mla::sm90
