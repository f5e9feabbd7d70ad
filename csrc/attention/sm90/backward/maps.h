// What the copy engine is told of queries, keys, values and gradients of out.
#pragma once

#include <cuda.h>

namespace pallas_attn::attention::sm90::backward {

// Dimensions, innermost first: element, head, token, batch. What lies outside reads as zero.
struct Maps {
  CUtensorMap query, d_out;
  CUtensorMap key, value;
};

}  // namespace pallas_attn::attention::sm90::backward
