// The loops of the two math warpgroups over a run's pages. Both take part in every page, so the two loops are
// best read side by side, with the drawing of the README; their steps are in consumer.h, in the order in
// which a page comes by them.
#pragma once

#include "mla/sm90/dense/consumer.h"

namespace pallas_attn::mla::sm90 {

// Scores of even pages, low half of the output.
template <typename Element, typename Source, typename Mask>
class EvenWarpgroup : Consumer<Element, Source, Mask, kEven> {
  using Base = Consumer<Element, Source, Mask, kEven>;

 public:
  using Base::Base;

  // The loop turns at the point where only this warpgroup's own product is running: ptxas gives up on
  // overlapping anything when a product that is later waited for by count crosses a loop's back edge.
  __device__ __forceinline__ void work_through(int part) {
    RunWalker<Source> walker(this->params_, part);
    PageRun next;
    bool more = walker.next(next);
    while (more) {
      const PageRun run = next;
      this->begin_run(run);
      if (run.num_pages() > 0) {
        process_even_page<false>(run, run.page_begin);
        int page = run.page_begin + 1;
        for (; page + 1 < run.page_end; page += 2) {
          process_odd_page();
          process_even_page<true>(run, page + 1);
        }
        const bool ends_odd = page < run.page_end;
        if (ends_odd) process_odd_page();
        this->template wait_products<0>();
        this->release(ends_odd ? kOdd : kEven);
      }
      // Its loads travel while this run's result is written.
      more = walker.next(next);
      this->end_run(run, !more);
    }
  }

 private:
  // On exit the product with this page is running.
  template <bool kOddProductRunning>
  __device__ __forceinline__ void process_even_page(const PageRun& run, int page) {
    if constexpr (kOddProductRunning) {
      // Handing the odd buffer back must not wait for the rest of this page to arrive, yet the tensor cores
      // should have something to do meanwhile: hence here.
      this->template scores<0, 2>(false);
      ptx::wgmma_commit();
      this->template wait_products<1>();
      this->release(kOdd);
      this->template scores<2, kPieces - 2>(true);
    } else {
      this->template scores<0, kPieces>(false);
    }
    ptx::wgmma_commit();
    this->template wait_scores<0>(page + 2 >= run.page_end);

    float rescale[kRowsPerThread];
    this->probabilities(run, page, rescale);
    this->publish(rescale);
    rescale_rows(this->rO_, rescale);
    this->multiply_own(kOddProductRunning);
  }

  // On entry the product with the even page before is running, on exit the one with this page.
  __device__ __forceinline__ void process_odd_page() {
    // Handed back before waiting for the other warpgroup: every moment earlier is a moment the next even page
    // arrives sooner, and its arrival is what the loop waits for.
    this->template wait_products<0>();
    this->release(kEven);
    this->multiply_others();
  }
};

// Scores of odd pages, high half of the output.
template <typename Element, typename Source, typename Mask>
class OddWarpgroup : Consumer<Element, Source, Mask, kOdd> {
  using Base = Consumer<Element, Source, Mask, kOdd>;

 public:
  using Base::Base;

  __device__ __forceinline__ void work_through(int part) {
    RunWalker<Source> walker(this->params_, part);
    PageRun next;
    bool more = walker.next(next);
    while (more) {
      const PageRun run = next;
      this->begin_run(run);
      if (run.num_pages() == 1) this->release_query();
      int page = run.page_begin;
      for (; page + 1 < run.page_end; page += 2) {
        finish_odd_product(page > run.page_begin);
        // The last scores of this warpgroup are those of the last odd page.
        process_pair(run, page + 1, page + 3 >= run.page_end);
      }
      finish_odd_product(page > run.page_begin);
      if (page < run.page_end) process_last_even_page();
      // Its loads travel while this run's result is written.
      more = walker.next(next);
      this->end_run(run, !more);
    }
  }

 private:
  // The odd buffer's high half can only be refilled after this, so it comes before waiting for the refill.
  __device__ __forceinline__ void finish_odd_product(bool running) {
    this->template wait_products<0>();
    if (running) this->release(kOdd);
  }

  // An even page, computed by the other warpgroup, and the odd page after it. Scores of the odd page are
  // queued first, so that the tensor cores have them while the other warpgroup is in its softmax; the product
  // with the even page is queued behind them and runs during this warpgroup's softmax.
  __device__ __forceinline__ void process_pair(const PageRun& run, int odd_page, bool last_scores) {
    this->template scores<kHalfPieces, kHalfPieces>(false);
    this->template scores<0, kHalfPieces>(true);
    this->template scores<kRopePiece, 1>(true);
    ptx::wgmma_commit();
    this->multiply_others();
    this->template wait_scores<1>(last_scores);

    float rescale[kRowsPerThread];
    this->probabilities(run, odd_page, rescale);
    this->publish(rescale);
    this->template wait_products<0>();
    this->release(kEven);
    rescale_rows(this->rO_, rescale);
    this->multiply_own(true);
  }

  __device__ __forceinline__ void process_last_even_page() {
    this->multiply_others();
    this->template wait_products<0>();
    this->release(kEven);
  }
};

}  // namespace pallas_attn::mla::sm90
