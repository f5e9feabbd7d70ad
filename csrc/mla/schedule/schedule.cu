// One block: the work is a chain of small steps, and more blocks would have to wait for each other.
#include "common/block_team.h"
#include "common/dependent_launch.h"
#include "mla/schedule/dealing.h"
#include "mla/schedule/schedule.h"
#include "ptx/control.h"

namespace pallas_attn::mla {
namespace {

// One for each request, where there can be so many, so that a step is one round. Not more: fewer start and
// meet sooner, and with 256 for up to 128 requests nothing is gained where their lengths vary.
constexpr int kFewThreads = 128, kSomeThreads = 256, kManyThreads = 1024;

template <int kThreads, bool kOnce>
__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ ScheduleParams params,
                                                            const __grid_constant__ DealingCounts counts) {
  using Team = BlockTeam<kThreads, kOnce>;
  extern __shared__ int memory[];
  __shared__ typename Team::Scratch scratch;
  ptx::wait_for_previous_kernel();
  Team team(scratch);
  deal(team, params, counts, DealingSpace(memory, params.batch));
}

template <int kThreads, bool kOnce>
LaunchStatus launch(const ScheduleParams& params, cudaStream_t stream) {
  using Team = BlockTeam<kThreads, kOnce>;
  const auto kernel = schedule_kernel<kThreads, kOnce>;
  const size_t shared_bytes = DealingSpace::bytes(params.batch);
  constexpr size_t kDefaultLimit = 48 * 1024 - sizeof(typename Team::Scratch);
  if (shared_bytes > kDefaultLimit) {
    const LaunchStatus raised =
        status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                  "raising the schedule kernel's shared memory limit");
    if (!raised.ok()) return raised;
  }
  return launch_dependent(kernel, dim3(1), kThreads, shared_bytes, stream, Blocks::kIndependent,
                          "launching the schedule kernel", params, DealingCounts(params, kThreads));
}

}  // namespace

LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  if (params.batch <= kFewThreads) return launch<kFewThreads, true>(params, stream);
  if (params.batch <= kSomeThreads) return launch<kSomeThreads, true>(params, stream);
  return launch<kManyThreads, false>(params, stream);
}

}  // namespace pallas_attn::mla
