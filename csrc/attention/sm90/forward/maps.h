// What the copy engine is told of queries, keys and values.
#pragma once

#include <cuda.h>

namespace pallas_attn::attention::sm90 {

// Dimensions, innermost first: element, head, token (of a page), batch (or page). What lies outside reads as
// zero.
struct Maps {
  CUtensorMap query;
  CUtensorMap key, value;          // in pages, or all of them in rows
  CUtensorMap new_key, new_value;  // in rows beside pages
};

// How a key tile is copied: in boxes of neighbouring tokens, one lane each.
struct Boxes {
  int rows;
  int query_bytes;
};

}  // namespace pallas_attn::attention::sm90
