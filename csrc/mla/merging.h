// Who merges the partial results of requests that were cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mla/params.h"

namespace pallas_attn::mla {

enum class Merging { kNothingIsCut, kInside, kKernelFollows };

// Whether there is so little to merge that a grid made for these rows alone is done with it before the decode
// kernel's CTAs have waited for each other.
inline bool few_rows_to_merge(const DecodeParams& params, int num_sms) {
  // The host does not know the lengths; this is what equal ones that fill the block table would give.
  const int64_t pages = static_cast<int64_t>(params.max_blocks) * params.batch;
  const int64_t splits = std::min<int64_t>(params.num_sm_parts, pages) / params.batch + 1;
  const int64_t rows = static_cast<int64_t>(params.batch) * params.all_rows();
  return params.batch <= params.num_sm_parts && rows <= 2 * num_sms && rows * splits <= 40 * num_sms;
}

}  // namespace pallas_attn::mla
