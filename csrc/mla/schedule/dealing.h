// How the pages of a batch are dealt out to parts of equal work. Written for any team of workers: the threads
// of a block (common/block_team.h), or a test's loop on the host.
//
// Lay every request's pages, and an overhead for starting on it, on one line: request i begins at start(i). A
// part that begins at p has spent its payload at p + payload. If that is inside a request, the next part
// begins one overhead before it, which it pays once more, but never before that request's own start:
//
//   next(p) = max(p + stride, last start <= p + stride + overhead)      with stride = payload - overhead
//
// So parts begin at a constant stride, except where one snaps to a start. A walk from start j snaps to the
// first start i whose place within the stride is at most an overhead behind j's:
//
//   (start(i) - start(j)) mod stride <= overhead
//
// which workers for each j ask the starts behind it, one subtraction and one comparison each. Then walks are
// followed chunk by chunk: from all starts of a chunk at once, to where they leave it. Each worker goes along
// the walk from the first start, one step a chunk, up to its request's, and finds there which parts begin
// inside the request.
//
// One block runs this once, with a warp or two for each scheduler, so most of its time goes by waiting for
// the instruction before. What counts is the longest chain of those that need each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"
#include "common/math.h"
#include "mla/params.h"

namespace pallas_attn::mla {

// What the 16 bits of a Hop hold, and, of requests, half of a block's shared memory.
constexpr int kMostRequests = 4096;
constexpr int kMostParts = 4096;
constexpr int kMostOverheadPages = 1024;
// Of a batch. A length that no memory holds must not make the sum overflow: other requests' parts hang on it.
constexpr int kMostPages = 1 << 30;

constexpr int kChunk = 32;   // starts, one for each bit of a word
constexpr int kAtOnce = 16;  // starts that a worker looks at before it asks whether to go on
// Strides from here on are too long for places of 32 bits on a circle.
constexpr int kLongStride = 1 << 15;

// Over some parts, from the start of one request to that of another; num_requests stands for the line's end.
// One word, taken apart by hand: compilers keep two halves in two registers.
struct Hop {
  uint32_t word;

  PALLAS_ATTN_DEVICE static Hop over(uint32_t parts, uint32_t request) { return {parts << 16 | request}; }
  PALLAS_ATTN_DEVICE int request() const { return word & 0xFFFF; }
  PALLAS_ATTN_DEVICE int parts() const { return word >> 16; }
  PALLAS_ATTN_DEVICE Hop then(Hop next) const { return {(word & 0xFFFF0000) + next.word}; }
};

// A walk from a start up to where it leaves the start's chunk.
struct alignas(8) Way {
  Hop exit;          // to the first start outside
  uint32_t visited;  // bit i: it snaps to start i of the chunk, its own included
};

struct alignas(8) IntPair {
  int first, second;
};
struct alignas(16) IntQuad {
  int first, second, third, fourth;
};

// Memory that the workers share.
struct DealingSpace {
  Way* way;    // [num_requests], of the walk from each start
  int* start;  // [num_requests + 1]
  int* snap;   // [num_requests + 1]: the first start that a walk from here can snap to, but for the next one
  // [num_requests + kAtOnce], of each start on the circle (see Line); the rest may hold anything
  uint32_t* place;

  static constexpr size_t bytes(int num_requests) {
    return num_requests * sizeof(Way) + (3 * num_requests + 2 + kAtOnce) * sizeof(int);
  }
  PALLAS_ATTN_DEVICE DealingSpace(void* memory, int num_requests) {
    way = static_cast<Way*>(memory);
    start = reinterpret_cast<int*>(way + num_requests);
    snap = start + num_requests + 1;
    place = reinterpret_cast<uint32_t*>(snap + num_requests + 1);
  }
};

PALLAS_ATTN_DEVICE inline int pages_of(int seq_len, int most) {
  const unsigned length = seq_len > 0 ? seq_len : 0;
  const int pages = (length + kPageTokens - 1) / kPageTokens;
  return pages < most ? pages : most;
}

// What is known without the lengths: on the host, which divides for the workers.
struct DealingCounts {
  int most_pages;      // of a request
  int least_overhead;  // and what whole requests are worth, in pages:
  int dear;
  int wholes;  // places for whole requests, as many in each part
  bool fits;   // hardly any part would be idle then
  Divisor parts, spare_parts, spare_wholes;
  // Requests have places among the workers, a power of two, and each is shared by several if there are
  // enough.
  int places_log2, sharers_log2;
  int workers;

  DealingCounts(const ScheduleParams& params, int num_workers)
      : DealingCounts(params, num_workers, params.batch, params.num_sm_parts,
                      ceil_div(params.batch, params.num_sm_parts) * params.num_sm_parts) {}

  PALLAS_ATTN_HOST_DEVICE int places() const { return 1 << places_log2; }
  PALLAS_ATTN_HOST_DEVICE int sharers() const { return 1 << sharers_log2; }

 private:
  DealingCounts(const ScheduleParams& params, int num_workers, int n, int num_parts, int wholes)
      : most_pages(kMostPages / n),
        least_overhead(n > num_parts        ? 5
                       : 16 * n > num_parts ? 2
                                            : 1),
        dear(params.rows <= 32    ? 8
             : params.rows <= 128 ? 20
                                  : 5),
        wholes(wholes),
        fits(wholes != n && 8 * (wholes - n) <= num_parts),
        parts(num_parts),
        spare_parts(num_parts + n - wholes),
        spare_wholes(at_least(1, wholes - n)),
        places_log2(highest_bit(2 * n - 1)),
        sharers_log2(highest_bit(at_least(1, num_workers >> places_log2))),
        workers(num_workers) {}
};

// The rule of `default_overhead` in pallas_attn/ops/mla_decode/schedule.py, where its reasons are. Nothing
// overflows: where lengths are looked at, there are at most 8/7 places a request, and kMostPages pages in
// all.
template <typename PageTotals>
PALLAS_ATTN_DEVICE int suitable_overhead(const DealingCounts& counts, const PageTotals& pages) {
  if (!counts.fits) return counts.least_overhead;
  const int needed = counts.spare_parts.into_up(at_least(0, counts.wholes * pages.most - pages.sum));
  const int to_stop = counts.spare_wholes.into_up(at_least(0, pages.sum - counts.wholes * pages.least));
  const bool alike = needed <= at_most(counts.dear, static_cast<int>(counts.parts.into(pages.sum / 4)));
  if (!alike) return counts.least_overhead;
  return at_least(counts.least_overhead, at_least(needed, at_most(kMostOverheadPages, to_stop)));
}

// The walk on the line.
struct Line {
  const int* start;
  int num_requests;
  int end;
  int overhead;
  int stride;
  Divisor by_stride;
  // A stride is a turn of a circle. If it is short, 2^32 units of a place are a turn and a bit, less than a
  // page more, so that differences of places need no modulo: an overhead ahead is less than overhead + 1
  // pages.
  uint32_t unit;   // of a page
  uint32_t limit;  // to how far ahead a walk snaps

  PALLAS_ATTN_DEVICE Line(const int* start, int num_requests, int total_pages, int overhead, Divisor parts)
      : start(start),
        num_requests(num_requests),
        end(total_pages + num_requests * overhead),
        overhead(overhead),
        stride(at_least<int>(overhead, parts.into_up(end))),
        by_stride(Divisor::of_small_quotients(stride)),  // there are no more than parts
        unit(stride < kLongStride ? by_stride.reciprocal() : 1),
        limit(stride < kLongStride ? at_most(overhead + 1, stride) * unit - 1 : overhead) {}

  PALLAS_ATTN_DEVICE uint32_t place_of(int position) const {
    return (position - by_stride.into(position) * stride) * unit;
  }

  // The fewest parts, at least one, whose last reaches over `distance` from where the first begins.
  PALLAS_ATTN_DEVICE int parts_over(int distance) const {
    return by_stride.into(at_least(0, distance - overhead - 1)) + 1;
  }

  // Parts that begin before `distance` from where the first begins.
  PALLAS_ATTN_DEVICE int parts_before(int distance) const {
    return by_stride.into(at_least(0, distance - 1)) + (distance > 0);
  }

  // Of `count` starts from `first` on, and perhaps some behind them, the first one that a walk from
  // `request`, two starts before it or more, can snap to; else the end.
  PALLAS_ATTN_DEVICE int first_snap(const uint32_t* place, int request, int first, int count) const {
    const uint32_t own = place[request];
    const int last = at_most(num_requests, first + count);
    if (stride >= kLongStride) {
      for (; first < last; ++first) {
        const uint32_t ahead = place[first] - own;
        // One of the two is below the stride, the other is not.
        if (at_most(ahead, ahead + stride) <= limit) return first;
      }
      return num_requests;
    }
    PALLAS_ATTN_KEEP_LOOP
    for (; first < last; first += kAtOnce) {
      int found = kAtOnce;
      PALLAS_ATTN_UNROLL
      for (int i = kAtOnce - 1; i >= 0; --i) {
        if (place[first + i] - own <= limit) found = i;
      }
      if (found < kAtOnce) return first + found;
    }
    return num_requests;
  }

  // To where the walk from `request` snaps next; `snap` is the first start that it can snap to.
  PALLAS_ATTN_DEVICE Hop hop(int request, int snap) const {
    const int origin = start[request];
    // Neighbours are at least an overhead apart. The next one is too near only without a page between them.
    const int next = start[request + 1] - origin;
    if (request + 1 == num_requests || parts_over(next) * stride <= next) snap = request + 1;
    const int parts = parts_over(start[snap] - origin);
    // The last one in reach: there may be another an overhead further.
    const bool reaches = snap < num_requests && start[snap + 1] <= origin + parts * stride + overhead;
    return Hop::over(parts, snap + reaches);
  }
};

// Follows the walk from every start through its chunk: space.way.
template <typename Team>
PALLAS_ATTN_DEVICE void follow(Team& team, const DealingSpace& space, const Line& line,
                               const DealingCounts& counts) {
  const int n = line.num_requests;
  team.each(counts.places() << counts.sharers_log2, [&](int worker) {
    const int share = worker >> counts.places_log2;
    // The first requests have most starts behind them: every other share has them in the last warps instead
    // of the first.
    const int request = (worker ^ -(share & 1)) & (counts.places() - 1);
    const int count = (n - 2 - request + counts.sharers() - 1) >> counts.sharers_log2;
    if (count <= 0) return;
    const int found = line.first_snap(space.place, request, request + 2 + share * count, count);
    if (found < n) team.lower(space.snap[request], found);
  });
  team.follow_in_chunks(
      n, [&](int i) { return line.hop(i, space.snap[i]); },
      [&](int i, Hop exit, uint32_t visited) { space.way[i] = {exit, visited}; });
}

// The walk from the first start, on its way from chunk to chunk.
struct Passage {
  Hop here;       // where it comes into a chunk, over the parts before; or the line's end
  Way way;        // from there on, but from the end
  int snaps = 0;  // before
  Hop earlier;    // the same of the chunk that it was in before
  Way earlier_way;

  PALLAS_ATTN_DEVICE explicit Passage(const Way* ways)
      : here(Hop::over(0, 0)), way(ways[0]), earlier(here), earlier_way(way) {}

  // To `start` or behind it.
  PALLAS_ATTN_DEVICE void go_to(int start, const Way* ways, int num_requests) {
    PALLAS_ATTN_KEEP_LOOP
    while (here.request() < start) {
      earlier = here;
      earlier_way = way;
      snaps += count_bits(way.visited);
      here = here.then(way.exit);
      way = ways[at_most(num_requests - 1, here.request())];
    }
  }
};

// The parts that begin inside a request, on the walk from the last start up to it that the walk snapped to.
struct Beginnings {
  int num_splits;  // of all requests before
  int from_parts;  // that begin before that start
  int from_start;
  int first, last;  // the parts in question, counted from that start; `last` exclusive

  // The passage is in the request's chunk, or has just left it behind.
  PALLAS_ATTN_DEVICE Beginnings(const Passage& passage, const Way* ways, const Line& line, int request) {
    const uint32_t up_to_here = (2u << request % kChunk) - 1;
    Hop entered = passage.here;
    Way way = passage.way;
    const bool came_here =
        entered.request() / kChunk == request / kChunk && entered.request() < line.num_requests;
    if (!came_here) way.visited = 0;
    uint32_t up_to = way.visited & up_to_here, beyond = way.visited & ~up_to_here;
    const int snaps = passage.snaps + count_bits(up_to);
    if (up_to == 0) {
      entered = passage.earlier;
      way = passage.earlier_way;
      up_to = way.visited;
      beyond = 0;
    }
    // Walks from two starts on the way leave the chunk together, so the difference is what lies between them.
    const int first_of_chunk = entered.request() & ~(kChunk - 1);
    const int from = first_of_chunk + highest_bit(up_to), exit_parts = ways[from].exit.parts();
    from_parts = entered.parts() + way.exit.parts() - exit_parts;
    from_start = line.start[from];
    int parts = exit_parts;
    if (beyond != 0) parts -= ways[first_of_chunk + highest_bit(beyond & -beyond)].exit.parts();
    first = at_most(parts, line.parts_before(line.start[request] - from_start));
    last = at_most(parts, line.parts_before(line.start[request + 1] - from_start));
    // One more for each request before it, and for each part that begins inside one of them: for all parts
    // but those that begin at a start.
    num_splits = request + from_parts + first - snaps + (from == request);
  }
};

// Fills the schedule and num_splits.
template <typename Team>
PALLAS_ATTN_DEVICE void deal(Team& team, const ScheduleParams& params, const DealingCounts& counts,
                             const DealingSpace& space) {
  const int n = params.batch;
  const auto pages =
      team.prefix_sum(n, [&](int i) { return pages_of(params.seq_lens[i], counts.most_pages); }, space.start);
  const int overhead = params.overhead_pages > 0 ? params.overhead_pages : suitable_overhead(counts, pages);
  const Line line(space.start, n, pages.sum, overhead, counts.parts);
  team.each(n, [&](int i) {
    const int start = space.start[i] + i * overhead;
    space.place[i] = line.place_of(start);
    space.start[i] = start;
    space.snap[i] = n;
    if (i == n - 1) space.start[n] = line.end;
  });
  follow(team, space, line, counts);

  const auto end_part = [&](int part, int request, int token) {
    *reinterpret_cast<IntPair*>(params.schedule + part * kScheduleFields + kEndRequest) = {request, token};
  };
  const auto begin_part = [&](int part, int request, int token, int split) {
    int* row = params.schedule + part * kScheduleFields;
    *reinterpret_cast<IntPair*>(row) = {request, token};
    *reinterpret_cast<IntQuad*>(row + kBeginSplit) = {split, 0, 0, 0};
  };
  team.each_at_last(counts.workers, [&](int worker) {
    const int share = worker >> counts.places_log2;
    const int last_length = params.seq_lens[n - 1];
    Passage passage(space.way);
    PALLAS_ATTN_KEEP_LOOP
    for (int request = worker & (counts.places() - 1); request < n; request += counts.workers) {
      const int length_before = params.seq_lens[at_least(0, request - 1)];
      passage.go_to(request & ~(kChunk - 1), space.way, n);
      const Beginnings parts(passage, space.way, line, request);
      if (share == 0) params.num_splits[request] = parts.num_splits;
      const int to_request = line.start[request] - parts.from_start;
      PALLAS_ATTN_KEEP_LOOP
      for (int i = parts.first + share; i < parts.last; i += counts.sharers()) {
        const int part = parts.from_parts + i, page = i * line.stride - to_request;
        // The request's first piece ends with the first part that begins inside it.
        const int split = page > 0 ? i - static_cast<int>(line.by_stride.into(to_request)) : 0;
        begin_part(part, request, page * kPageTokens, split);
        // There the part before ends.
        if (page > 0) {
          end_part(part - 1, request, page * kPageTokens);
        } else if (request > 0) {
          end_part(part - 1, request - 1, length_before);
        }
      }
    }
    passage.go_to(n, space.way, n);
    const int used = passage.here.parts();
    if (worker == 0) params.num_splits[n] = n + used - passage.snaps;
    // The last part with work ends where all work does, and those without begin there.
    PALLAS_ATTN_KEEP_LOOP
    for (int part = used - 1 + worker; part < params.num_sm_parts; part += counts.workers) {
      end_part(part, n - 1, last_length);
      if (part >= used) begin_part(part, n, 0, 0);
    }
  });
}

}  // namespace pallas_attn::mla
