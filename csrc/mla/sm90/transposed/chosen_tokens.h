// The kernel over chosen tokens: to it a query token's list of ids is what a request's pages are to the one
// over all_tokens.h, and 64 of them are a page.
#pragma once

#include "mla/sm90/transposed/gatherer.h"
#include "mla/sm90/transposed/softmax.h"

namespace pallas_attn::mla::sm90::transposed {

struct ChosenTokens {
  using Params = SparseParams;
  using Lengths = TokenLists;
  template <int kRows>
  using Plan = ChosenPlan<kRows>;
  template <typename Plan>
  using Feeder = Gatherer<Plan>;

  // Tokens that are not there are zeros.
  static constexpr bool kHoldsTail = false;
  static constexpr bool kHasSinks = true;

  static bool never_cut(const SparseParams& params) { return params.nothing_is_cut; }

  template <typename Scores, typename Plan>
  static __device__ __forceinline__ void hide(Scores& rS, const DecodeParams&, const Plan& smem,
                                              const PageRun&, int, int stage, const Place& at) {
    const uint64_t held = smem.held[stage];
    // NaN must stay, also of what is not there.
    if (!__any_sync(0xffffffff, held != ~uint64_t{0} && smem.bad_page[stage] == 0)) return;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (held >> at.token(i) & 1) continue;
      visit_row_pairs<Plan::kRows>([&](int j) { rS.at(j, i, 0) = rS.at(j, i, 1) = -INFINITY; });
    }
  }
};

}  // namespace pallas_attn::mla::sm90::transposed
