// The kernel that makes 16-bit rows of 8-bit pages on the host, for test_attention_widen_on_host.py: a call
// from standard input, what it writes to standard output.
#include "arrays.h"
#include "attention/widen/kernel.h"

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

alignas(1024) char shared_memory[stand_in::kSharedBytes];

struct Call {
  int fp16, int8, tokens, group, kv_heads, head_dim, value_dim;
  int num_pages, page_size, max_pages, num_seqs, heads_first, least_rows, least_pairs, room, ctas;
};

template <typename Widening>
void run(const WidenParams& params, int ctas) {
  stand_in::run_grid(dim3(ctas), 1, [&] {
    auto* const scratch = reinterpret_cast<typename Widening::Scratch*>(shared_memory);
    Widening(params, reinterpret_cast<int*>(scratch + 1)).work(*scratch);
  });
}
template <typename Element>
void run_with(const WidenParams& params, int ctas) {
  if (params.call.cache == CacheType::kE4m3) {
    run<Widening<Element, true>>(params, ctas);
  } else {
    run<Widening<Element, false>>(params, ctas);
  }
}

}  // namespace

int main() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  const auto strides = [&](int dim) -> Strides {
    const int64_t page = int64_t{call.page_size} * call.kv_heads * dim;
    if (call.heads_first) return {int64_t{call.page_size} * dim, dim, page};
    return {dim, int64_t{call.kv_heads} * dim, page};
  };
  const size_t slots = size_t{1} * call.num_pages * call.page_size * call.kv_heads;
  auto key = Array<char>(slots * call.head_dim).read();
  auto value = Array<char>(slots * call.value_dim).read();
  auto tables = Array<int>(size_t{1} * call.num_seqs * call.max_pages).read();
  auto lengths = Array<int>(call.num_seqs).read();
  auto bounds = Array<int>(call.num_seqs + 1).read();
  auto now = Array<int>(1).read();
  auto window = Array<int>(2).read();
  const size_t rows = size_t{1} * call.kv_heads * call.room;
  Array<uint16_t> wide_key(rows * call.head_dim), wide_value(rows * call.value_dim);
  Array<int> q_bounds(call.num_seqs * kDocumentStep), k_bounds(call.num_seqs * kDocumentStep),
      taken(call.num_seqs);

  WidenParams params = {};
  ForwardParams& of = params.call;
  of.key = key.data(), of.value = value.data();
  of.key_strides = strides(call.head_dim), of.value_strides = strides(call.value_dim);
  of.q_spans = {bounds.data(), 1};
  of.block_tables = tables.data(), of.seq_lens = lengths.data(), of.window = window.data();
  of.num_seqs_now = now.data();
  of.batch = 1, of.q_len = call.tokens, of.group = call.group, of.num_kv_heads = call.kv_heads;
  of.num_pages = call.num_pages, of.page_size = call.page_size, of.max_pages = call.max_pages;
  of.num_seqs = of.seqs_per_batch = call.num_seqs;
  of.head_dim = call.head_dim, of.value_dim = call.value_dim;
  of.ends_aligned = true;
  of.cache = call.int8 ? CacheType::kInt8 : CacheType::kE4m3;
  params.least_rows = call.least_rows, params.least_pairs = call.least_pairs, params.room = call.room;
  params.key = wide_key.data(), params.value = wide_value.data();
  params.taken = taken.data(), params.q_bounds = q_bounds.data(), params.k_bounds = k_bounds.data();
  stand_in::shared = shared_memory;
  stand_in::threads = kWidenThreads;
  call.fp16 ? run_with<__half>(params, call.ctas) : run_with<__nv_bfloat16>(params, call.ctas);
  wide_key.write(), wide_value.write();
  q_bounds.write(), k_bounds.write(), taken.write();
}
