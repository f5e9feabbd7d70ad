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

// Every role of the CTA walks the same schedule by itself, so roles meet only at barriers.
class TileWalker {
 public:
  __device__ TileWalker(const DecodeParams& params, int part) : params_(params) {
    const int4 row = *reinterpret_cast<const int4*>(params.schedule + part * kScheduleFields);
    begin_request_ = row.x;
    begin_page_ = row.y / kPageTokens;
    end_request_ = min(row.z, params.batch - 1);
    end_page_ = ceil_div(row.w, kPageTokens);
    begin_split_ = params.schedule[part * kScheduleFields + kBeginSplit];
    request_ = begin_request_;
  }

  __device__ bool next(SplitTile& tile) {
    if (request_ > end_request_) return false;
    const int given = params_.seq_lens[request_];
    const int first_slot = params_.num_splits[request_];
    const int splits = params_.num_splits[request_ + 1] - first_slot;
    const int64_t capacity = static_cast<int64_t>(params_.max_blocks) * kPageTokens;

    tile.request = request_;
    tile.beyond_capacity = given > capacity;
    tile.seq_len = max(0, tile.beyond_capacity ? static_cast<int>(capacity) : given);
    const int pages = ceil_div(tile.seq_len, kPageTokens);
    const bool first = request_ == begin_request_;
    tile.page_begin = first ? begin_page_ : 0;
    tile.page_end = request_ == end_request_ ? min(end_page_, pages) : pages;
    tile.page_end = max(tile.page_end, tile.page_begin);
    tile.partial_slot = splits == 1 ? -1 : first_slot + (first ? begin_split_ : 0);
    ++request_;
    return true;
  }

 private:
  const DecodeParams& params_;
  int begin_request_, begin_page_, end_request_, end_page_, begin_split_;
  int request_;
};

}  // namespace pallas_attn::mla::sm90
