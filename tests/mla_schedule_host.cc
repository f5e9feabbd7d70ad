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

struct LoneWorker {
  bool leads() const { return true; }

  template <typename Holds>
  int first(int begin, int end, Holds holds) const {
    for (int i = begin; i < end; ++i) {
      if (holds(i)) return i;
    }
    return end;
  }
};

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
  void each_by_group(int count, Work work) {
    each(count, [&](int i) { work(LoneWorker(), i); });
  }

  template <typename Value>
  void prefix_sum(int count, Value value, int* sums) {
    sums[0] = 0;
    for (int i = 0; i < count; ++i) sums[i + 1] = sums[i] + value(i);
  }

  struct Extremes {
    int least, most;
  };
  template <typename Value>
  Extremes extremes(int count, Value value) {
    Extremes found = {value(0), value(0)};
    for (int i = 1; i < count; ++i) {
      found = {std::min<int>(found.least, value(i)), std::max<int>(found.most, value(i))};
    }
    return found;
  }

 private:
  std::mt19937 random_{1};
};

}  // namespace

// Arrays as in ScheduleParams. Returns whether nothing was written behind the working memory.
extern "C" bool deal_on_host(const int* seq_lens, int batch, int num_sm_parts, int overhead_pages, int rows,
                             int* schedule, int* num_splits) {
  using namespace pallas_attn::mla;
  constexpr int kGuard = 0x5A5A5A5A;
  const size_t bytes = DealingSpace::bytes(batch, num_sm_parts);
  std::vector<int> memory(bytes / sizeof(int) + 2, kGuard);
  LoopTeam team;
  deal(team, {seq_lens, schedule, num_splits, batch, num_sm_parts, overhead_pages, rows},
       DealingSpace(memory.data(), batch));
  return memory.back() == kGuard;
}
