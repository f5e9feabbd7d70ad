// What a row's log-sum-exp is where all its keys are known: for tiles that are whole, and for those that are
// merged.
#pragma once

#include <cmath>

#include "attention/params.h"
#include "common/math.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::attention {

__device__ __forceinline__ float log_sum_exp(const ForwardParams& params, const RowLse& lse) {
  return params.base2_lse ? log2_of(lse) : log2_of(lse) * kLn2;
}

// In two parts: what a backward pass takes off logits before it scales them, here the largest key's, of which
// scale or soft cap are taken off again, unless ALiBi came behind them, and what is then left, base 2. `all`
// has the sink, too.
__device__ __forceinline__ void store_parts(const ForwardParams& params, float keys_maximum,
                                            const RowLse& all, int64_t place) {
  float part = -INFINITY, rest = log2_of(all);
  if (keys_maximum != -INFINITY) {
    float by = kLog2E;
    if (params.alibi == nullptr) by *= params.softcap > 0.0f ? params.softcap : __ldg(params.scale);
    part = keys_maximum / by;
    rest = fmaf(-part, by, keys_maximum) + (all.maximum - keys_maximum) + log2f(all.total);
  }
  params.lse[place] = part;
  params.rest[place] = rest;
}

}  // namespace pallas_attn::attention
