// Which pages of which requests a CTA works on: a part of the schedule, unrolled one request at a time.
#pragma once

#include <cstdint>

#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// Neighbouring pages of one request.
struct PageRun {
  int request;
  int page_begin;
  int page_end;
  int seq_len;       // at least 0, at most what its pages hold
  int partial_slot;  // where the partial result goes, or -1 for a request of one split
  // Splits of the request, where this is the first of few and the last run of its part (see
  // LastRun::add_partials); else 0.
  int kept_splits;
  bool bad_length;  // the length given was negative or longer than that: the result is NaN

  __device__ int num_pages() const { return page_end - page_begin; }
};

// Every role of the CTA walks the same schedule by itself, so roles meet only at barriers. (Telling the math
// warpgroups through shared memory saves them the loads, but what comes from there the compiler takes to
// differ between threads, and guards every branch, loop and wgmma descriptor over it.) Where the next run
// begins is known from the schedule's row alone, so that its page numbers can be fetched together with its
// length. A schedule that was not made for these lengths gives wrong results, but keeps within the arrays.
//
// `Source` knows how many tokens a request has (pages.h).
template <typename Source>
class RunWalker {
 public:
  __device__ RunWalker(const DecodeParams& params, int part)
      : params_(params), row_(*reinterpret_cast<const int4*>(params.schedule + part * kScheduleFields)) {
    begin_split_ = params.schedule[part * kScheduleFields + kBeginSplit];
    request_ = max(row_.x, 0);
  }

  __device__ bool done() const { return request_ > row_.z || request_ >= params_.batch; }
  __device__ int request() const { return request_; }
  __device__ int page_begin() const { return request_ == row_.x ? max(row_.y, 0) / kPageTokens : 0; }

  // Sends for what the next run depends on; run() waits for it. Only when not done.
  __device__ __forceinline__ void fetch() {
    given_ = Source::length(params_, request_);
    first_slot_ = __ldg(params_.num_splits + request_);
    end_slot_ = __ldg(params_.num_splits + request_ + 1);
  }

  // The run that was fetched; moves on to the one after.
  __device__ __forceinline__ PageRun run() {
    // In 64 bits: the table may be wider than any length.
    const int64_t capacity = Source::capacity(params_);

    PageRun run;
    run.request = request_;
    run.bad_length = given_ < 0 || given_ > capacity;
    run.seq_len = static_cast<int>(max(int64_t{0}, min(int64_t{given_}, capacity)));
    const int pages = ceil_div(run.seq_len, kPageTokens);
    run.page_begin = page_begin();
    run.page_end = request_ == row_.z ? min(ceil_div(row_.w, kPageTokens), pages) : pages;
    run.page_end = max(run.page_end, run.page_begin);
    const bool whole = end_slot_ - first_slot_ == 1;
    const int slot = first_slot_ + (request_ == row_.x ? begin_split_ : 0);
    run.partial_slot = whole ? -1 : min(max(slot, 0), params_.num_slots() - 1);
    const int splits = end_slot_ - first_slot_;
    const bool kept = !whole && splits <= kMostKeptSplits && slot == first_slot_ && request_ == row_.z;
    run.kept_splits = kept ? splits : 0;
    ++request_;
    return run;
  }

  // Both at once; false when there is no more work.
  __device__ __forceinline__ bool next(PageRun& next_run) {
    if (done()) return false;
    fetch();
    next_run = run();
    return true;
  }

 private:
  const DecodeParams& params_;
  const int4 row_;  // begin request, begin token, end request, end token
  int begin_split_;
  int request_;
  int given_, first_slot_, end_slot_;  // of the run that was fetched
};

}  // namespace pallas_attn::mla::sm90
