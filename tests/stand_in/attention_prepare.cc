// What orders attention's tiles on the host, for test_attention_prepare_on_host.py: lengths from standard
// input, work items to standard output, and how many there are.
#include "arrays.h"
#include "attention/prepare/kernel.h"

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

alignas(1024) char shared_memory[stand_in::kSharedBytes];

struct Call {
  int num_seqs, tokens, group, kv_heads, page_size, max_pages;
  int max_items, max_partials;
  int tile_tokens, tile_keys, ctas, keys_in_l2;
  int kv_len;  // rows of so many keys and `tokens` queries; 0: pages
  int step;    // of bounds: 1, or 3 where documents have queries and keys in rows
};

}  // namespace

int main() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  auto lengths = Array<int>(call.num_seqs).read();
  const bool documents = call.step == kDocumentStep;
  const size_t num_bounds = documents ? call.num_seqs * call.step : call.num_seqs + 1;
  auto bounds = Array<int>(num_bounds).read();
  auto key_bounds = Array<int>(documents ? num_bounds : 0).read();
  auto taken = Array<int>(call.num_seqs).read();
  Array<WorkItem> items(call.max_items);
  Array<SplitTile> split_tiles(call.max_partials);
  Array<int> first_tile(call.num_seqs + 3);
  int window[2] = {-1, 0};
  Counters counters = {};
  ForwardParams params = {};
  params.window = window;
  params.taken = taken.data();
  if (documents) {
    params.q_spans = {bounds.data(), call.step}, params.k_spans = {key_bounds.data(), call.step};
  } else if (call.kv_len == 0) {
    params.q_spans = {bounds.data(), 1};
    params.seq_lens = lengths.data();
    params.block_tables = lengths.data();  // not looked at
  }
  params.kv_len = call.kv_len;
  params.batch = call.kv_len > 0 && !documents ? call.num_seqs : 1, params.q_len = call.tokens,
  params.group = call.group, params.num_kv_heads = call.kv_heads;
  params.num_seqs = call.num_seqs, params.seqs_per_batch = call.num_seqs / params.batch;
  params.page_size = call.page_size, params.max_pages = call.max_pages;
  params.ends_aligned = true;
  params.keys_in_l2 = call.keys_in_l2;
  params.max_items = call.max_items, params.max_partials = call.max_partials;
  params.items = items.data(), params.split_tiles = split_tiles.data(), params.first_tile = first_tile.data();
  params.counters = &counters;
  const Tiling tiling = {call.tile_tokens, call.tile_keys, call.ctas};
  stand_in::shared = shared_memory;
  stand_in::threads = kThreads;
  if (has_equal_sequences(params)) {
    counters = counters_of_equal(params, tiling);
  } else {
    stand_in::run_grid(dim3(1), 1,
                       [&] { prepare(params, tiling, *reinterpret_cast<Scratch*>(shared_memory)); });
  }
  std::fwrite(&counters, sizeof(counters), 1, stdout);
  items.write();
}
