// How the pages of a batch are dealt out to parts of equal work. Written for any team of workers: the threads
// of a block (common/block_team.h), or a test's loop on the host.
//
// Lay every request's pages, and an overhead for starting on it, on one line: request i begins at start(i). A
// part that begins at p has spent its payload at p + payload. If that is inside a request, the next part
// begins one overhead before it, which it pays once more, but never before that request's own start:
//
//   next(p) = max(p + stride, last start <= p + stride + overhead)      with stride = payload - overhead
//
// So parts begin at a constant stride, except where one snaps to a start. Where the walk from each start
// snaps next is a search that all workers share; which starts lie on the walk from the first one follows by
// doubling: with the first 2^r of them and every start's 2^r-th successor, the next 2^r are one look-up each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"
#include "common/math.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// What the 16 bits of a Hop and a block's shared memory hold.
constexpr int kMostRequests = 16384;
constexpr int kMostParts = 4096;
constexpr int kMostOverheadPages = 1024;
// Of a batch. A length that no memory holds must not make the sum overflow: other requests' parts hang on it.
constexpr int kMostPages = 1 << 30;

// Over some parts, from the start of one request to that of another; num_requests stands for the line's end.
struct alignas(4) Hop {
  uint16_t request;
  uint16_t parts;

  PALLAS_ATTN_DEVICE Hop then(Hop next) const {
    return {next.request, static_cast<uint16_t>(parts + next.parts)};
  }
};

// Memory that the workers share.
struct DealingSpace {
  int* pages_before;  // [num_requests + 1]
  Hop* hops;          // [num_requests + 1]
  Hop* spare_hops;    // [num_requests + 1]
  Hop* path;          // [path_capacity]: the starts that the walk from the first one snaps to

  static constexpr int path_capacity(int num_requests, int num_parts) {
    return (num_requests < num_parts ? num_requests : num_parts) + 1;
  }
  static constexpr size_t bytes(int num_requests, int num_parts) {
    return (num_requests + 1) * (sizeof(int) + 2 * sizeof(Hop)) +
           path_capacity(num_requests, num_parts) * sizeof(Hop);
  }
  PALLAS_ATTN_DEVICE DealingSpace(void* memory, int num_requests) {
    pages_before = static_cast<int*>(memory);
    hops = reinterpret_cast<Hop*>(pages_before + num_requests + 1);
    spare_hops = hops + num_requests + 1;
    path = spare_hops + num_requests + 1;
  }
};

// How many of the first `count` numbers `holds` is true for: it must be for the first ones and no others.
template <typename Holds>
PALLAS_ATTN_DEVICE int count_leading(int count, Holds holds) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool beyond = holds(low + half);
    low = beyond ? low + half + 1 : low;
    count = beyond ? count - half - 1 : half;
  }
  return low;
}

PALLAS_ATTN_DEVICE inline int pages_of(int seq_len, int most) {
  const unsigned length = seq_len > 0 ? seq_len : 0;
  const int pages = (length + kPageTokens - 1) / kPageTokens;
  return pages < most ? pages : most;
}

// The rule of `default_overhead` in pallas_attn/ops/mla_decode/schedule.py, where its reasons are. Nothing
// overflows: where lengths are looked at, there are at most 8/7 slots a request, and kMostPages pages in all.
template <typename Team>
PALLAS_ATTN_DEVICE int suitable_overhead(Team& team, const ScheduleParams& params, const int* pages_before) {
  const int n = params.batch, parts = params.num_sm_parts;
  const int low = n > parts ? 5 : 16 * n > parts ? 2 : 1;
  const int slots = ceil_div(n, parts) * parts;
  if (slots == n || 8 * (slots - n) > parts) return low;
  const auto [shortest, longest] =
      team.extremes(n, [&](int i) { return pages_before[i + 1] - pages_before[i]; });
  const int total = pages_before[n];
  const auto larger = [](int a, int b) { return a > b ? a : b; };
  const auto smaller = [](int a, int b) { return a < b ? a : b; };

  const int needed = ceil_div(larger(slots * longest - total, 0), parts + n - slots);
  const int to_stop = ceil_div(larger(total - slots * shortest, 0), slots - n);
  const int dear = params.rows <= 32 ? 8 : params.rows <= 128 ? 20 : 5;
  const bool alike = needed <= smaller(dear, total / (4 * parts));
  return alike ? larger(low, larger(needed, smaller(to_stop, kMostOverheadPages))) : low;
}

// The line and the walk on it.
struct Line {
  const int* pages_before;
  int num_requests;
  int overhead;
  int stride;
  Divisor by_stride;

  PALLAS_ATTN_DEVICE Line(const int* pages_before, const ScheduleParams& params, int overhead)
      : pages_before(pages_before),
        num_requests(params.batch),
        overhead(overhead),
        stride(stride_for(end(), params.num_sm_parts, overhead)),
        by_stride(stride) {}

  PALLAS_ATTN_DEVICE int start(int request) const { return pages_before[request] + request * overhead; }
  PALLAS_ATTN_DEVICE int end() const { return start(num_requests); }
  PALLAS_ATTN_DEVICE int last_start_up_to(int position) const {
    return count_leading(num_requests + 1, [&](int i) { return start(i) <= position; }) - 1;
  }
  // The fewest parts, at least one, whose last reaches over `distance` from where the first begins.
  PALLAS_ATTN_DEVICE int parts_over(int distance) const {
    return distance <= overhead ? 1 : by_stride.into(distance - overhead - 1) + 1;
  }

  // From a request's start to where the walk snaps next; `group` searches together.
  template <typename Group>
  PALLAS_ATTN_DEVICE Hop hop(const Group& group, int request) const {
    const int origin = start(request);
    const int parts_to_end = parts_over(end() - origin);
    int parts;
    if (num_requests - request <= kStartsAPart * parts_to_end) {
      // Ask the starts: does a part hand over there?
      const int found = group.first(request + 1, num_requests, [&](int i) {
        const int distance = start(i) - origin;
        return parts_over(distance) * stride <= distance;
      });
      parts = parts_over(start(found) - origin);
    } else {
      // Ask the parts: is there a start where they hand over?
      parts = group.first(1, parts_to_end, [&](int m) {
        const int handover = origin + m * stride;
        return start(last_start_up_to(handover + overhead)) >= handover;
      });
    }
    const int snapped =
        parts < parts_to_end ? last_start_up_to(origin + parts * stride + overhead) : num_requests;
    return {static_cast<uint16_t>(snapped), static_cast<uint16_t>(parts)};
  }

 private:
  // A part's question costs about this many times a start's.
  static constexpr int kStartsAPart = 4;

  static PALLAS_ATTN_DEVICE int stride_for(int end, int num_parts, int overhead) {
    const int share = (end - 1) / num_parts + 1;  // rounded up
    return share > overhead ? share : overhead;
  }
};

// Lists the starts on the walk from the first one, with the number of parts that begin before each. Returns
// how many there are.
template <typename Team>
PALLAS_ATTN_DEVICE int list_path(Team& team, const DealingSpace& space, const Line& line, int capacity) {
  const int n = line.num_requests;
  team.each_by_group(n, [&](const auto& group, int i) {
    const Hop hop = line.hop(group, i);
    if (!group.leads()) return;
    space.hops[i] = hop;
    if (i == 0) {
      space.hops[n] = {static_cast<uint16_t>(n), 0};
      space.path[0] = {0, 0};
    }
  });
  int length = 1;
  Hop *hops = space.hops, *twice = space.spare_hops;
  while (length < capacity && space.path[length - 1].request != n) {
    team.each(n + 1, [&](int i) {
      const Hop hop = hops[i];
      twice[i] = hop.then(hops[hop.request]);
      if (i < length && length + i < capacity) {
        const Hop listed = space.path[i];
        space.path[length + i] = listed.then(hops[listed.request]);
      }
    });
    length = 2 * length < capacity ? 2 * length : capacity;
    Hop* const swapped = hops;
    hops = twice;
    twice = swapped;
  }
  return length;
}

// Fills the schedule and num_splits.
template <typename Team>
PALLAS_ATTN_DEVICE void deal(Team& team, const ScheduleParams& params, const DealingSpace& space) {
  const int n = params.batch, num_parts = params.num_sm_parts;
  const int most_pages = kMostPages / n;
  team.prefix_sum(n, [&](int i) { return pages_of(params.seq_lens[i], most_pages); }, space.pages_before);
  const int overhead =
      params.overhead_pages > 0 ? params.overhead_pages : suitable_overhead(team, params, space.pages_before);
  const Line line(space.pages_before, params, overhead);
  const int listed = list_path(team, space, line, DealingSpace::path_capacity(n, num_parts));
  const Hop* path = space.path;

  // A part ends where the next one begins, the last one where all work ends.
  const auto write_begin = [&](int part) {
    const Hop from = path[count_leading(listed, [&](int i) { return path[i].parts <= part; }) - 1];
    int request = n, page = 0, split = 0;
    if (from.request < n) {
      const int beyond = part - from.parts;  // parts that began since the last snap
      const int distance = beyond * line.stride;
      request = line.last_start_up_to(line.start(from.request) + distance);
      const int to_request = line.start(request) - line.start(from.request);
      page = distance - to_request;
      // The request's first piece ends with the first part that begins inside it.
      split = page > 0 ? beyond - static_cast<int>(line.by_stride.into(to_request)) : 0;
    }
    if (part < num_parts) {
      int* row = params.schedule + part * kScheduleFields;
      row[kBeginRequest] = request;
      row[kBeginToken] = page * kPageTokens;
      row[kBeginSplit] = split;
      for (int field = kBeginSplit + 1; field < kScheduleFields; ++field) row[field] = 0;
    }
    if (part > 0) {
      int* row = params.schedule + (part - 1) * kScheduleFields;
      const int last = request > 0 ? request - 1 : 0;
      row[kEndRequest] = page > 0 ? request : request - 1;
      row[kEndToken] = page > 0 ? page * kPageTokens : params.seq_lens[last];
    }
  };
  // A request more for each before it, and a piece more for each part that begins inside one of them: all
  // that begin before it but those that begin at a start.
  const auto write_splits = [&](int request) {
    int cuts = 0;
    if (request > 0) {
      const int snaps = count_leading(listed, [&](int i) { return path[i].request < request; });
      const Hop from = path[snaps - 1];
      const int distance = line.start(request) - line.start(from.request);
      const int beyond = line.by_stride.into(distance - 1) + 1;
      const int to_snap = path[snaps].parts - from.parts;
      cuts = from.parts + (beyond < to_snap ? beyond : to_snap) - snaps;
    }
    params.num_splits[request] = request + cuts;
  };
  team.each(num_parts + 1 + n + 1, [&](int i) {
    if (i <= num_parts) {
      write_begin(i);
    } else {
      write_splits(i - num_parts - 1);
    }
  });
}

}  // namespace pallas_attn::mla
