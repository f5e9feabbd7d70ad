// Which pages of which requests a CTA works on: a part of the schedule, unrolled one request at a time.
#pragma once

#include <cstdint>

#include "mla/params.h"
#include "mla/slots.h"

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
    splits_before_ = __ldg(params_.num_splits + request_);
    splits_end_ = __ldg(params_.num_splits + request_ + 1);
  }

  // The run that was fetched; moves on to the one after.
  __device__ __forceinline__ PageRun run() {
    // In 64 bits: the table may be wider than any length.
    const int64_t capacity = Source::capacity(params_);

    PageRun run;
    run.request = request_;
    run.bad_length = given_ < 0 || given_ > capacity;
    run.seq_len = static_cast<int>(max(int64_t{0}, min(int64_t{given_}, capacity)));
    const bool begins_part = request_ == row_.x, ends_part = request_ == row_.z;
    const int pages = pages_of(run.seq_len);
    run.page_begin = page_begin();
    run.page_end = ends_part ? min(pages_of(max(row_.w, 0)), pages) : pages;
    run.page_end = max(run.page_end, run.page_begin);
    const int splits = splits_end_ - splits_before_;
    const int split = begins_part ? begin_split_ : 0;
    run.partial_slot = splits == 1 ? -1 : partial_slot(params_, request_, splits_before_, split);
    const bool kept = splits > 1 && splits <= kMostKeptSplits && split == 0 && ends_part;
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
  // Pages of so many tokens, of which there may be 2^31 - 1.
  static __device__ __forceinline__ int pages_of(int tokens) {
    return (static_cast<unsigned>(tokens) + (kPageTokens - 1)) / kPageTokens;
  }

  const DecodeParams& params_;
  const int4 row_;  // begin request, begin token, end request, end token
  int begin_split_;
  int request_;
  int given_, splits_before_, splits_end_;  // of the run that was fetched
};

}  // namespace pallas_attn::mla::sm90
