// Which pages of which requests a CTA works on: a part of the schedule, unrolled one request at a time.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/load.h"
#include "common/math.h"
#include "mla/params.h"
#include "mla/partials.h"

namespace pallas_attn::mla::sm90 {

// Requests of at most this many splits are merged by the CTA of the first one, in its registers.
constexpr unsigned kMostKeptSplits = 3;

// Neighbouring pages of one request.
struct PageRun {
  int request;
  int page_begin;
  int page_end;
  int seq_len;  // at least 0, at most what its pages hold
  int partial;  // where the partial result goes, or -1 for a request of one split
  // Splits of the request, where this is the first of few and the last run of its part (see
  // LastRun::add_partials); else 0.
  int kept_splits;
  bool bad_length;  // the length given was negative or longer than that: the result is NaN

  PALLAS_ATTN_HOST_DEVICE int num_pages() const { return page_end - page_begin; }
};

// Where a part begins and ends: the first fields of its row of the schedule.
struct alignas(16) PartBounds {
  int begin_request, begin_token, end_request, end_token;
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
  PALLAS_ATTN_HOST_DEVICE RunWalker(const DecodeParams& params, int part)
      : params_(params),
        bounds_(*reinterpret_cast<const PartBounds*>(params.schedule + part * kScheduleFields)),
        begin_split_(params.schedule[part * kScheduleFields + kBeginSplit]),
        request_(at_least(0, bounds_.begin_request)) {}

  PALLAS_ATTN_HOST_DEVICE bool done() const {
    return request_ > bounds_.end_request || request_ >= params_.batch;
  }
  PALLAS_ATTN_HOST_DEVICE int request() const { return request_; }
  PALLAS_ATTN_HOST_DEVICE int page_begin() const {
    return begins_part() ? at_least(0, bounds_.begin_token) / kPageTokens : 0;
  }

  // Sends for what the next run depends on; run() waits for it. Only when not done.
  PALLAS_ATTN_HOST_DEVICE void fetch() {
    given_ = Source::length(params_, request_);
    splits_before_ = load_constant(params_.num_splits + request_);
    splits_end_ = load_constant(params_.num_splits + request_ + 1);
  }

  // The run that was fetched; moves on to the one after.
  PALLAS_ATTN_HOST_DEVICE PageRun run() {
    // In 64 bits: the table may be wider than any length.
    const int64_t capacity = Source::capacity(params_);

    PageRun run;
    run.request = request_;
    run.bad_length = given_ < 0 || given_ > capacity;
    run.seq_len = static_cast<int>(at_least<int64_t>(0, at_most<int64_t>(capacity, given_)));
    const bool ends_part = request_ == bounds_.end_request;
    const int pages = pages_of(run.seq_len);
    run.page_begin = page_begin();
    run.page_end = ends_part ? at_most(pages, pages_of(at_least(0, bounds_.end_token))) : pages;
    run.page_end = at_least(run.page_begin, run.page_end);
    // Unsigned, because a schedule of other lengths may say anything.
    const unsigned splits = static_cast<unsigned>(splits_end_) - static_cast<unsigned>(splits_before_);
    const int split = begins_part() ? begin_split_ : 0;
    run.partial = splits == 1 ? -1 : partial_of(params_, request_, splits_before_, split);
    const bool kept = splits > 1 && splits <= kMostKeptSplits && split == 0 && ends_part;
    run.kept_splits = kept ? static_cast<int>(splits) : 0;
    ++request_;
    return run;
  }

  // Both at once; false when there is no more work.
  PALLAS_ATTN_HOST_DEVICE bool next(PageRun& next_run) {
    if (done()) return false;
    fetch();
    next_run = run();
    return true;
  }

 private:
  // Pages of so many tokens, of which there may be 2^31 - 1.
  static PALLAS_ATTN_HOST_DEVICE int pages_of(int tokens) {
    return static_cast<int>((static_cast<unsigned>(tokens) + (kPageTokens - 1)) / kPageTokens);
  }

  PALLAS_ATTN_HOST_DEVICE bool begins_part() const { return request_ == bounds_.begin_request; }

  const DecodeParams& params_;
  const PartBounds bounds_;
  const int begin_split_;
  int request_;
  int given_, splits_before_, splits_end_;  // of the run that was fetched
};

}  // namespace pallas_attn::mla::sm90
