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
// which workers for each j ask the starts behind it, one subtraction and one comparison each. Then the walk
// from the first start is followed chunk by chunk: for all starts of a chunk at once, where a walk from there
// leaves it; one step a chunk; and each request finds in its own chunk which parts begin inside it.
//
// One block runs this once, so most of its time goes by waiting: for each barrier, for each instruction that
// is fetched for the first time. Short code is fast code here.
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

constexpr int kChunk = 32;   // starts, one for each bit of a word
constexpr int kAtOnce = 16;  // starts that a worker looks at before it asks whether to go on
// No start's residue, and far from all of them.
constexpr uint32_t kNowhere = 1u << 31;

// Over some parts, from the start of one request to that of another; num_requests stands for the line's end.
struct alignas(4) Hop {
  uint16_t request;
  uint16_t parts;

  PALLAS_ATTN_DEVICE Hop then(Hop next) const {
    return {next.request, static_cast<uint16_t>(parts + next.parts)};
  }
};

struct alignas(8) IntPair {
  int first, second;
};

// The walk from the first start on its way into a chunk. `request` may be behind the chunk.
struct ChunkEntry {
  Hop here;     // over the parts before
  Hop earlier;  // the same of the last chunk that the walk came into
  int snaps;    // before the chunk
};

// Memory that the workers share.
struct DealingSpace {
  int* start;  // [num_requests + 1]
  union {
    uint32_t* residue;  // [num_requests + kAtOnce]: start modulo stride, then kNowhere
    uint32_t* visited;  // later: bit i, that a walk from here snaps to start i of its chunk
  };
  union {
    int* snap;  // [num_requests + 1]: the first start that a walk from here can snap to, but for the next one
    Hop* exit;  // later: to the first one outside its chunk
  };
  ChunkEntry* entry;  // [num_chunks]

  static constexpr int num_chunks(int num_requests) { return num_requests / kChunk + 1; }
  static constexpr size_t bytes(int num_requests) {
    return (3 * num_requests + 2 + kAtOnce) * sizeof(int) + num_chunks(num_requests) * sizeof(ChunkEntry);
  }
  PALLAS_ATTN_DEVICE DealingSpace(void* memory, int num_requests) {
    start = static_cast<int*>(memory);
    residue = reinterpret_cast<uint32_t*>(start + num_requests + 1);
    snap = start + num_requests + 1 + num_requests + kAtOnce;
    entry = reinterpret_cast<ChunkEntry*>(snap + num_requests + 1);
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
  int slots;  // for whole requests, the same number in each part
  bool fits;  // hardly any part would be idle then
  Divisor parts, spare_parts, spare_slots;
  // Requests have places among the workers, a power of two, and each is shared by several if there are
  // enough.
  int places_log2, sharers_log2;

  DealingCounts(const ScheduleParams& params, int num_workers)
      : DealingCounts(params, num_workers, params.batch, params.num_sm_parts,
                      ceil_div(params.batch, params.num_sm_parts) * params.num_sm_parts) {}

  PALLAS_ATTN_HOST_DEVICE int places() const { return 1 << places_log2; }
  PALLAS_ATTN_HOST_DEVICE int sharers() const { return 1 << sharers_log2; }

 private:
  DealingCounts(const ScheduleParams& params, int num_workers, int n, int num_parts, int slots)
      : most_pages(kMostPages / n),
        least_overhead(n > num_parts        ? 5
                       : 16 * n > num_parts ? 2
                                            : 1),
        dear(params.rows <= 32    ? 8
             : params.rows <= 128 ? 20
                                  : 5),
        slots(slots),
        fits(slots != n && 8 * (slots - n) <= num_parts),
        parts(num_parts),
        spare_parts(num_parts + n - slots),
        spare_slots(at_least(1, slots - n)),
        places_log2(highest_bit(2 * n - 1)),
        sharers_log2(highest_bit(at_least(1, num_workers >> places_log2))) {}
};

// The rule of `default_overhead` in pallas_attn/ops/mla_decode/schedule.py, where its reasons are. Nothing
// overflows: where lengths are looked at, there are at most 8/7 slots a request, and kMostPages pages in all.
template <typename PageTotals>
PALLAS_ATTN_DEVICE int suitable_overhead(const DealingCounts& counts, const PageTotals& pages) {
  if (!counts.fits) return counts.least_overhead;
  const int needed = counts.spare_parts.into_up(at_least(0, counts.slots * pages.most - pages.sum));
  const int to_stop = counts.spare_slots.into_up(at_least(0, pages.sum - counts.slots * pages.least));
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

  PALLAS_ATTN_DEVICE Line(const int* start, int num_requests, int total_pages, int overhead, Divisor parts)
      : start(start),
        num_requests(num_requests),
        end(total_pages + num_requests * overhead),
        overhead(overhead),
        stride(at_least<int>(overhead, parts.into_up(end))),
        by_stride(stride) {}

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
  PALLAS_ATTN_DEVICE int first_snap(const uint32_t* residue, int request, int first, int count) const {
    const uint32_t own = residue[request], limit = overhead, turn = stride;
    const int last = at_most(num_requests, first + count);
    for (; first < last; first += kAtOnce) {
      int found = num_requests;
      PALLAS_ATTN_UNROLL
      for (int i = kAtOnce - 1; i >= 0; --i) {
        const uint32_t ahead = residue[first + i] - own;
        // One of the two is below the stride, the other is not.
        if (at_most(ahead, ahead + turn) <= limit) found = first + i;
      }
      if (found < num_requests) return found;
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
    return {static_cast<uint16_t>(snap + reaches), static_cast<uint16_t>(parts)};
  }
};

// Follows the walk from the first start. Then space.entry, visited and exit are filled, and exit[n] is the
// number of parts that begin before the line's end.
template <typename Team>
PALLAS_ATTN_DEVICE void walk(Team& team, const DealingSpace& space, const Line& line,
                             const DealingCounts& counts, int* num_splits) {
  const int n = line.num_requests;
  team.each(counts.places() << counts.sharers_log2, [&](int worker) {
    const int request = worker & (counts.places() - 1), share = worker >> counts.places_log2;
    const int count = (n - 2 - request + counts.sharers() - 1) >> counts.sharers_log2;
    if (count <= 0) return;
    const int found = line.first_snap(space.residue, request, request + 2 + share * count, count);
    if (found < n) team.lower(space.snap[request], found);
  });
  team.follow_in_chunks(
      n, [&](int i) { return line.hop(i, space.snap[i]); },
      [&](int i, Hop exit, uint32_t visited) {
        space.exit[i] = exit;
        space.visited[i] = visited;
      });
  team.each(1, [&](int) {
    ChunkEntry at = {{0, 0}, {0, 0}, 0};
    PALLAS_ATTN_KEEP_LOOP
    for (int first = 0; first < n; first += kChunk) {
      space.entry[first / kChunk] = at;
      const Hop here = at.here;
      if (here.request >= first + kChunk || here.request == n) continue;
      at = {here.then(space.exit[here.request]), here, at.snaps + count_bits(space.visited[here.request])};
    }
    space.exit[n] = at.here;
    num_splits[n] = n + at.here.parts - at.snaps;
  });
}

// The parts that begin inside a request, on the walk from the last start up to it that the walk snapped to.
struct Beginnings {
  int num_splits;  // of all requests before
  int from_parts;  // that begin before that start
  int from_start;
  int first, last;  // the parts in question, counted from that start; `last` exclusive

  PALLAS_ATTN_DEVICE Beginnings(const DealingSpace& space, const Line& line, int request) {
    const ChunkEntry entry = space.entry[request / kChunk];
    const uint32_t up_to_here = (2u << request % kChunk) - 1;
    const bool came_here =
        entry.here.request / kChunk == request / kChunk && entry.here.request < line.num_requests;
    const uint32_t visited_here = came_here ? space.visited[entry.here.request] : 0;
    uint32_t up_to = visited_here & up_to_here, beyond = visited_here & ~up_to_here;
    Hop entered = entry.here;
    const int snaps = entry.snaps + count_bits(up_to);
    if (up_to == 0) {
      entered = entry.earlier;
      up_to = space.visited[entered.request];
      beyond = 0;
    }
    // Walks from two starts on the way leave the chunk together, so the difference is what lies between them.
    const int first_of_chunk = entered.request & ~(kChunk - 1);
    const int from = first_of_chunk + highest_bit(up_to), exit_parts = space.exit[from].parts;
    from_parts = entered.parts + space.exit[entered.request].parts - exit_parts;
    from_start = line.start[from];
    int parts = exit_parts;
    if (beyond != 0) parts -= space.exit[first_of_chunk + highest_bit(beyond & -beyond)].parts;
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
  team.each(n + kAtOnce, [&](int i) {
    const int start = i <= n ? space.start[i] + i * overhead : 0;
    space.residue[i] = i < n ? start - line.by_stride.into(start) * line.stride : kNowhere;
    if (i > n) return;
    space.start[i] = start;
    space.snap[i] = n;
  });
  walk(team, space, line, counts, params.num_splits);

  const auto end_part = [&](int part, int request, int token) {
    *reinterpret_cast<IntPair*>(params.schedule + part * kScheduleFields + kEndRequest) = {request, token};
  };
  const auto begin_part = [&](int part, int request, int token, int split) {
    int* row = params.schedule + part * kScheduleFields;
    *reinterpret_cast<IntPair*>(row) = {request, token};
    *reinterpret_cast<IntPair*>(row + kBeginSplit) = {split, 0};
    *reinterpret_cast<IntPair*>(row + kBeginSplit + 2) = {0, 0};
  };
  const int num_workers = counts.places() << counts.sharers_log2;
  team.each(num_workers, [&](int worker) {
    const int request = worker & (counts.places() - 1), share = worker >> counts.places_log2;
    if (request < n) {
      const Beginnings parts(space, line, request);
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
          end_part(part - 1, request - 1, params.seq_lens[request - 1]);
        }
      }
    }
    // The last part with work ends where all work does, and those without begin there.
    const int used = space.exit[n].parts;
    PALLAS_ATTN_KEEP_LOOP
    for (int part = used - 1 + worker; part < params.num_sm_parts; part += num_workers) {
      end_part(part, n - 1, params.seq_lens[n - 1]);
      if (part >= used) begin_part(part, n, 0, 0);
    }
  });
}

}  // namespace pallas_attn::mla
