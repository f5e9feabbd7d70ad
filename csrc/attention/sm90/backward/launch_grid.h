// Launching a kernel whose CTAs stay: one for each multiprocessor, or for each tile where there are fewer.
#pragma once

#include <algorithm>

#include "attention/backward_params.h"
#include "attention/sm90/backward/maps.h"
#include "common/dependent_launch.h"
#include "common/multiprocessors.h"
#include "sm90/shared_limit.h"

namespace pallas_attn::attention::sm90::backward {

template <typename Plan>
LaunchStatus launch_grid(void (*kernel)(BackwardParams, Maps), const BackwardParams& params, const Maps& maps,
                         int64_t tiles, int threads, cudaStream_t stream) {
  constexpr int kSmemBytes = sizeof(Plan);
  static_assert(kSmemBytes <= kSmemLimit);
  // Every time: both answers are those of the current context.
  int num_sms = 0;
  LaunchStatus status = count_multiprocessors(&num_sms);
  if (status.ok()) {
    status = status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes),
                       "raising the backward kernel's shared memory limit");
  }
  if (!status.ok()) return status;
  return launch_dependent(kernel, dim3(static_cast<unsigned>(std::min<int64_t>(num_sms, tiles))), threads,
                          kSmemBytes, stream, Blocks::kIndependent, "launching the backward kernel", params,
                          maps);
}

// The most tiles of a head's tokens that may have some: where there are documents, of one token each.
inline int64_t most_tiles(const BackwardParams& params, const Spans& spans, int tokens, int rows) {
  return int64_t{params.batch} * (spans.bounds == nullptr ? (tokens + rows - 1) / rows : tokens);
}

}  // namespace pallas_attn::attention::sm90::backward
