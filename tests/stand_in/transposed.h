// What the programs for tokens of 656 bytes have in common. A call comes from standard input, which a test
// writes: its numbers, then its arrays. Its result goes to standard output.
#pragma once

#include "arrays.h"
#include "mla/sm90/transposed/kernel.h"

namespace pallas_attn::mla::sm90::transposed {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}

namespace stand_in {

namespace mla = pallas_attn::mla;
namespace transposed = pallas_attn::mla::sm90::transposed;

template <typename Call>
Call read_call() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) fail("no call");
  return call;
}

// Arrays of a call, next in its input.
struct Schedule {
  explicit Schedule(mla::DecodeParams& params)
      : parts(Array<int>(params.num_sm_parts * mla::kScheduleFields).read()),
        splits(Array<int>(params.batch + 1).read()) {
    params.schedule = parts.data(), params.num_splits = splits.data();
  }
  Array<int> parts, splits;
};

// Runs the kernel of the smallest tile that holds a KV head's rows, and writes its result.
template <typename Tokens>
void run_transposed(typename Tokens::Params& params, mla::Merging merging) {
  const int rows = params.rows();
  const size_t all = static_cast<size_t>(params.batch) * params.all_rows();
  const size_t partials = static_cast<size_t>(params.num_partials()) * params.all_rows();
  Array<uint16_t> out(all * mla::kLatentDim);
  Array<float> lse(all), partial_out(partials * mla::kLatentDim);
  Array<pallas_attn::RowLse> partial_lse(partials);
  params.out = out.data(), params.lse = lse.data();
  params.partial_out = partial_out.data(), params.partial_lse = partial_lse.data();
  const dim3 grid(pallas_attn::ceil_div(rows, 64), params.num_sm_parts, params.num_kv_heads);
  shared = transposed::shared_memory;
  run_grid(grid, mla::sm90::kConsumerThreads, [&] {
    if (rows <= 16) return transposed::transposed_decode_kernel<Tokens, 16>(params, merging);
    if (rows <= 32) return transposed::transposed_decode_kernel<Tokens, 32>(params, merging);
    transposed::transposed_decode_kernel<Tokens, 64>(params, merging);
  });
  out.write();
  lse.write();
}

}  // namespace stand_in
