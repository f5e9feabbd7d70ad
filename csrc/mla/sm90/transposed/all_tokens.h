// The kernel over pages: all tokens of a request, of which a row may see those up to its own position.
// chosen_tokens.h is its counterpart; kernel, consumer and launch take either.
#pragma once

#include "mla/sm90/dense/page_table.h"
#include "mla/sm90/dense/pages.h"
#include "mla/sm90/transposed/producer.h"
#include "mla/sm90/transposed/softmax.h"

namespace pallas_attn::mla::sm90::transposed {

struct AllTokens {
  using Params = DecodeParams;
  using Lengths = PageTable;
  template <int kRows>
  using Plan = TransposedPlan<kRows>;
  template <typename Plan>
  using Feeder = Producer<WholePages, Plan>;

  // A request's last page may hold slots that are not its own, with anything in them.
  static constexpr bool kHoldsTail = true;
  // Nobody asks for them, and they would cost 64 rows a spilled register.
  static constexpr bool kHasSinks = false;

  static bool never_cut(const DecodeParams&) { return false; }

  // Scores of a page that a row must not see.
  template <typename Scores, typename Plan>
  static __device__ __forceinline__ void hide(Scores& rS, const DecodeParams& params, const Plan& smem,
                                              const PageRun& run, int page, int stage, const Place& at) {
    if (!PrefixMask::hides_any(params, run, page)) return;
    // NaN must stay, also for rows that see none of the page: all of the request's are.
    if (__any_sync(0xffffffff, smem.bad_page[stage] != 0)) return;
    const int first_row = place_of_block(at.owner).first_row();
    visit_row_pairs<Plan::kRows>([&](int j) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int row = first_row + at.row(j) + right;
        const int end = PrefixMask::end_of(params, run, row) - page * kPageTokens;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
          if (at.token(i) >= end) rS.at(j, i, right) = -INFINITY;
        }
      }
    });
  }
};

}  // namespace pallas_attn::mla::sm90::transposed
