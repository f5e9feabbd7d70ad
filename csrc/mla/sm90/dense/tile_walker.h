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
  int seq_len;       // at least 0, at most the block table's capacity
  int partial_slot;  // where the partial result goes, or -1 for a request of one split
  bool bad_length;   // the length given was negative or longer than that: the result is NaN

  __device__ int num_pages() const { return page_end - page_begin; }
};

// Every role of the CTA walks the same schedule by itself, so roles meet only at barriers. (Telling the math
// warpgroups through shared memory saves them the loads, but what comes from there the compiler takes to
// differ between threads, and guards every branch, loop and wgmma descriptor over it.) Where the next tile
// begins is known from the schedule's row alone, so that its page numbers can be fetched together with its
// length.
class TileWalker {
 public:
  __device__ TileWalker(const DecodeParams& params, int part)
      : params_(params), row_(*reinterpret_cast<const int4*>(params.schedule + part * kScheduleFields)) {
    begin_split_ = params.schedule[part * kScheduleFields + kBeginSplit];
    request_ = row_.x;
  }

  __device__ bool done() const { return request_ > row_.z || request_ >= params_.batch; }
  __device__ int request() const { return request_; }
  __device__ int page_begin() const { return request_ == row_.x ? row_.y / kPageTokens : 0; }

  // False when there is no more work.
  __device__ __forceinline__ bool next(SplitTile& tile) {
    if (done()) return false;
    const int given = __ldg(params_.seq_lens + request_);
    const int first_slot = __ldg(params_.num_splits + request_);
    const int splits = __ldg(params_.num_splits + request_ + 1) - first_slot;
    // In 64 bits: the table may be wider than any length.
    const int64_t capacity = static_cast<int64_t>(params_.max_blocks) * kPageTokens;

    tile.request = request_;
    tile.bad_length = given < 0 || given > capacity;
    tile.seq_len = static_cast<int>(max(int64_t{0}, min(int64_t{given}, capacity)));
    const int pages = ceil_div(tile.seq_len, kPageTokens);
    tile.page_begin = page_begin();
    tile.page_end = request_ == row_.z ? min(ceil_div(row_.w, kPageTokens), pages) : pages;
    tile.page_end = max(tile.page_end, tile.page_begin);
    tile.partial_slot = splits == 1 ? -1 : first_slot + (request_ == row_.x ? begin_split_ : 0);
    ++request_;
    return true;
  }

 private:
  const DecodeParams& params_;
  const int4 row_;  // begin request, begin token, end request, end token
  int begin_split_;
  int request_;
};

}  // namespace pallas_attn::mla::sm90
