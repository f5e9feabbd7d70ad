// The walk over one part of a schedule for test_run_walker.py, in plain numbers.
#include "mla/sm90/dense/run_walker.h"

namespace {

using namespace pallas_attn::mla;

struct Lengths {
  static int length(const DecodeParams& params, int request) { return params.seq_lens[request]; }
  static int64_t capacity(const DecodeParams& params) { return int64_t{params.max_blocks} * kPageTokens; }
};

struct Run {
  int request, page_begin, page_end, seq_len, partial, kept_splits, bad_length;
};

}  // namespace

// Fills `runs`, in which there is room for a run of every request, and gives their number.
extern "C" int walk_on_host(int batch, int num_parts, int max_blocks, const int* seq_lens,
                            const int* schedule, const int* num_splits, int part, Run* runs) {
  DecodeParams params = {};
  params.batch = batch;
  params.num_sm_parts = num_parts;
  params.max_blocks = max_blocks;
  params.seq_lens = seq_lens;
  params.schedule = schedule;
  params.num_splits = num_splits;
  sm90::RunWalker<Lengths> walker(params, part);
  sm90::PageRun run;
  int count = 0;
  while (walker.next(run)) {
    runs[count++] = {run.request, run.page_begin,  run.page_end,  run.seq_len,
                     run.partial, run.kept_splits, run.bad_length};
  }
  return count;
}
