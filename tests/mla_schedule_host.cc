// The schedule kernel's algorithm on the host: a loop in random order stands in for the threads of a block,
// so that a step which depends on their order gives wrong results. Built and called by
// test_mla_schedule_kernel.py.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "mla/schedule/dealing.h"

namespace {

class LoopTeam {
 public:
  template <typename Work>
  void each(int count, Work work) {
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (int i : order) work(i);
  }

  template <typename Work>
  void each_at_last(int count, Work work) {
    each(count, work);
  }

  static void lower(int& value, int to) { value = std::min(value, to); }

  struct Totals {
    int sum, least, most;
  };
  template <typename Value>
  Totals prefix_sum(int count, Value value, int* sums) {
    Totals all = {0, value(0), value(0)};
    for (int i = 0; i < count; ++i) {
      sums[i] = all.sum;
      all = {all.sum + value(i), std::min<int>(all.least, value(i)), std::max<int>(all.most, value(i))};
    }
    return all;
  }

  template <typename HopOf, typename Store>
  void follow_in_chunks(int count, HopOf hop_of, Store store) {
    using Hop = decltype(hop_of(0));
    for (int first = 0; first < count; first += 32) {
      const int end = std::min(first + 32, count);
      std::vector<Hop> hops;
      for (int i = first; i < end; ++i) hops.push_back(hop_of(i));
      for (int i = first; i < end; ++i) {
        Hop way = hops[i - first];
        uint32_t visited = 1u << (i - first);
        while (way.request() < end) {
          visited |= 1u << (way.request() - first);
          way = way.then(hops[way.request() - first]);
        }
        store(i, way, visited);
      }
    }
  }

 private:
  std::mt19937 random_{1};
};

}  // namespace

// Arrays as in ScheduleParams. Returns whether nothing was written behind the working memory.
extern "C" bool deal_on_host(const int* seq_lens, int batch, int num_sm_parts, int overhead_pages, int rows,
                             int num_workers, int* schedule, int* num_splits) {
  using namespace pallas_attn::mla;
  constexpr int kGuard = 0x5A5A5A5A;
  const size_t bytes = DealingSpace::bytes(batch);
  std::vector<int> memory(bytes / sizeof(int) + 2, kGuard);
  LoopTeam team;
  const ScheduleParams params = {seq_lens, schedule, num_splits, batch, num_sm_parts, overhead_pages, rows};
  deal(team, params, DealingCounts(params, num_workers), DealingSpace(memory.data(), batch));
  return memory.back() == kGuard;
}

extern "C" unsigned small_quotient(unsigned dividend, unsigned divisor) {
  return pallas_attn::Divisor::of_small_quotients(divisor).into(dividend);
}
