// Which pages of which requests a CTA works on: the schedule's row, unrolled one request at a time.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// A run of pages of one request.
struct SplitTile {
  int request;
  int page_begin;
  int page_end;
  int seq_len;             // at least 0, at most the block table's capacity
  bool beyond_capacity;    // the length given was longer: the result is NaN
  int partial_slot;        // where the partial result goes, or -1 for a request of one split

  __device__ int num_pages() const { return page_end - page_begin; }
};

// Every role of the CTA walks the same schedule by itself, so roles meet only at barriers. The schedule's row is read
// again for every request: it stays in L1, and the math warpgroups have no registers to keep it in.
class TileWalker {
 public:
  __device__ TileWalker(const DecodeParams& params, int part)
      : params_(params), row_(params.schedule + part * kScheduleFields), request_(row_[kBeginRequest]) {}

  __device__ __forceinline__ bool next(SplitTile& tile) {
    const int4 row = *reinterpret_cast<const int4*>(row_);
    const int begin_request = row.x, begin_token = row.y, end_request = row.z, end_token = row.w;
    if (request_ > end_request || request_ >= params_.batch) return false;
    const int given = params_.seq_lens[request_];
    const int first_slot = params_.num_splits[request_];
    const int splits = params_.num_splits[request_ + 1] - first_slot;
    const int64_t capacity = static_cast<int64_t>(params_.max_blocks) * kPageTokens;
    const bool first = request_ == begin_request;

    tile.request = request_;
    tile.beyond_capacity = given > capacity;
    tile.seq_len = max(0, tile.beyond_capacity ? static_cast<int>(capacity) : given);
    const int pages = ceil_div(tile.seq_len, kPageTokens);
    tile.page_begin = first ? begin_token / kPageTokens : 0;
    tile.page_end = request_ == end_request ? min(ceil_div(end_token, kPageTokens), pages) : pages;
    tile.page_end = max(tile.page_end, tile.page_begin);
    tile.partial_slot = splits == 1 ? -1 : first_slot + (first ? row_[kBeginSplit] : 0);
    ++request_;
    return true;
  }

 private:
  const DecodeParams& params_;
  const int* row_;
  int request_;
};

}  // namespace pallas_attn::mla::sm90
