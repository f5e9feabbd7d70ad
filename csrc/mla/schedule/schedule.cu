// One block: the work is a chain of small steps, and more blocks would have to wait for each other.
#include "common/block_team.h"
#include "common/dependent_launch.h"
#include "mla/schedule/dealing.h"
#include "mla/schedule/schedule.h"
#include "ptx/control.h"

namespace pallas_attn::mla {
namespace {

// A warp looks for where the walk from one request snaps, so many requests want many warps: 1024 threads are
// 6 us faster than 256 with 128 requests, and 0.8 us slower, by starting and meeting, with up to 8.
constexpr int kFewThreads = 256, kManyThreads = 1024;
constexpr int kFewRequests = 16;

template <int kThreads>
__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ ScheduleParams params) {
  using Team = BlockTeam<kThreads>;
  extern __shared__ int memory[];
  __shared__ typename Team::Scratch scratch;
  ptx::wait_for_previous_kernel();
  Team team(scratch);
  deal(team, params, DealingSpace(memory, params.batch));
}

template <int kThreads>
LaunchStatus launch(const ScheduleParams& params, cudaStream_t stream) {
  using Team = BlockTeam<kThreads>;
  const auto kernel = schedule_kernel<kThreads>;
  const size_t shared_bytes = DealingSpace::bytes(params.batch, params.num_sm_parts);
  constexpr size_t kDefaultLimit = 48 * 1024 - sizeof(typename Team::Scratch);
  if (shared_bytes > kDefaultLimit) {
    const LaunchStatus raised =
        status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                  "raising the schedule kernel's shared memory limit");
    if (!raised.ok()) return raised;
  }
  return launch_dependent(kernel, dim3(1), kThreads, shared_bytes, stream, Blocks::kIndependent,
                          "launching the schedule kernel", params);
}

}  // namespace

LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  return params.batch <= kFewRequests ? launch<kFewThreads>(params, stream)
                                      : launch<kManyThreads>(params, stream);
}

}  // namespace pallas_attn::mla
