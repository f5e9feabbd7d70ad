// The schedule kernel's block on the host: the very code, block_team.h included, by a thread for each of the
// block's. Built and called by test_mla_schedule_kernel.py.
#include <vector>

#include "common/block_team.h"
#include "cuda_on_host/cuda_runtime.h"
#include "mla/schedule/dealing.h"

namespace {

using namespace pallas_attn;

template <int kThreads, bool kOnce>
void deal_by_team(const mla::ScheduleParams& params) {
  std::vector<int> memory(mla::DealingSpace::bytes(params.batch) / sizeof(int) + 1);
  using Team = BlockTeam<kThreads, kOnce>;
  typename Team::Scratch scratch;
  const mla::DealingCounts counts(params, kThreads);
  cuda_on_host::run_block(kThreads, [&] {
    Team team(scratch);
    mla::deal(team, params, counts, mla::DealingSpace(memory.data(), params.batch));
  });
}

// As the kernel is launched.
template <int kThreads>
void deal_by(const mla::ScheduleParams& params) {
  params.batch <= kThreads ? deal_by_team<kThreads, true>(params) : deal_by_team<kThreads, false>(params);
}

}  // namespace

// Arrays as in ScheduleParams; 128 or 256 threads.
extern "C" bool deal_on_host(const int* seq_lens, int batch, int num_sm_parts, int overhead_pages, int rows,
                             int num_threads, int* schedule, int* num_splits) {
  const mla::ScheduleParams params = {seq_lens,     schedule,       num_splits, batch,
                                      num_sm_parts, overhead_pages, rows};
  if (num_threads == 128) deal_by<128>(params);
  if (num_threads == 256) deal_by<256>(params);
  return num_threads == 128 || num_threads == 256;
}
