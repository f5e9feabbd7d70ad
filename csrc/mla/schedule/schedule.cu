// One block: the work is a chain of small steps, and more blocks would have to wait for each other.
#include "common/block_team.h"
#include "common/dependent_launch.h"
#include "mla/schedule/dealing.h"
#include "mla/schedule/schedule.h"
#include "ptx/control.h"

namespace pallas_attn::mla {
namespace {

constexpr int kThreads = 1024;
using Team = BlockTeam<kThreads>;

__global__ void __launch_bounds__(kThreads) schedule_kernel(const __grid_constant__ ScheduleParams params) {
  extern __shared__ int memory[];
  __shared__ Team::Scratch scratch;
  ptx::wait_for_previous_kernel();
  Team team(scratch);
  deal(team, params, DealingSpace(memory, params.batch));
}

}  // namespace

LaunchStatus launch_schedule(const ScheduleParams& params, cudaStream_t stream) {
  const size_t shared_bytes = DealingSpace::bytes(params.batch, params.num_sm_parts);
  constexpr size_t kDefaultLimit = 48 * 1024 - sizeof(Team::Scratch);
  if (shared_bytes > kDefaultLimit) {
    const LaunchStatus raised = status_of(
        cudaFuncSetAttribute(schedule_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "raising the schedule kernel's shared memory limit");
    if (!raised.ok()) return raised;
  }
  return launch_dependent(schedule_kernel, dim3(1), kThreads, shared_bytes, stream, Blocks::kIndependent,
                          "launching the schedule kernel", params);
}

}  // namespace pallas_attn::mla
