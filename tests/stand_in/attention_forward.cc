// Attention's forward kernel on the host, for test_attention_on_host.py: a call from standard input, its
// result to standard output.
#include "arrays.h"
#include "attention/sm90/forward/launch_impl.h"
#include "attention/sm90/forward/shapes.h"
#include "tensor_maps.h"

namespace pallas_attn::attention::sm90 {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

struct Call {
  int fp16, tokens, heads, kv_heads, head_dim, value_dim;
  int num_pages, page_size, max_pages, num_seqs, heads_first, apart, skip_rows, ctas;
  int softcap, sinks, alibi;  // whether there are such
  int cache, by_page;         // a CacheType; whether its scales are
  float scale, cap;
};

template <typename Element, typename Shape>
void run(ForwardParams& params, const Call& call) {
  using namespace attention::sm90;
  // As prepare_kernel, but for the order and without splits.
  std::vector<WorkItem> items;
  const int num_seqs = num_seqs_now(params), tile_tokens = Shape::kRows / params.group;
  const Window window(params);
  for (int seq = 0; seq < num_seqs + 2; ++seq) {
    const Sequence sequence(params, seq, num_seqs);
    if (!sequence.padding && sequence.q_len * params.group <= params.skip_rows) continue;
    for (int token = 0; token < sequence.q_len; token += tile_tokens) {
      WorkItem item = {seq, token, std::min(tile_tokens, sequence.q_len - token), 0, 0, -1, -1};
      const int place = token + sequence.offset;
      const int begin = window.begin(place), end = window.end(place + item.tokens - 1, sequence.k_len);
      if (begin < end) {
        item.first_key = begin / Shape::kKeys;
        item.num_keys = ceil_div(end, Shape::kKeys) - item.first_key;
      }
      items.push_back(item);
    }
  }
  Counters counters = {0, static_cast<int>(items.size()), 0, params.num_kv_heads};
  params.items = items.data(), params.counters = &counters, params.equal = counters;
  const Boxes boxes = boxes_of<Shape>(params);
  Maps maps;
  encode_maps<Element, Shape>(params, boxes, &maps);
  stand_in::shared = shared_memory;
  stand_in::threads = Shape::kThreads;
  stand_in::run_grid(dim3(call.ctas), 1,
                     [&] { forward_kernel<Element, Shape, Form::kUsual>(params, maps, boxes); });
}

}  // namespace

int main() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  const auto shape = [](int tokens, int heads, int dim, bool heads_first) -> Strides {
    const int64_t head = heads_first ? int64_t{tokens} * dim : dim, token = heads_first ? dim : heads * dim;
    return {head, token, int64_t{tokens} * heads * dim};
  };
  ForwardParams params = {};
  const size_t tokens = call.tokens, slots = size_t{1} * call.num_pages * call.page_size * call.kv_heads;
  auto query = Array<uint16_t>(tokens * call.heads * call.head_dim).read();
  const size_t element_bytes = call.cache == 0 ? 2 : 1;
  auto key = Array<char>(slots * call.head_dim * element_bytes).read();
  auto value = Array<char>(slots * call.value_dim * element_bytes).read();
  const size_t scales = call.cache == 0 ? 0 : call.by_page ? call.num_pages * call.kv_heads : call.kv_heads;
  auto key_scale = Array<float>(scales).read();
  auto value_scale = Array<float>(scales).read();
  const size_t rows = call.apart ? tokens * call.kv_heads : 0;
  auto new_key = Array<uint16_t>(rows * call.head_dim).read();
  auto new_value = Array<uint16_t>(rows * call.value_dim).read();
  auto tables = Array<int>(size_t{1} * call.num_seqs * call.max_pages).read();
  auto lengths = Array<int>(call.num_seqs).read();
  auto bounds = Array<int>(call.num_seqs + 1).read();
  auto window = Array<int>(2).read();
  auto sinks = Array<float>(call.sinks ? call.heads : 0).read();
  auto alibi = Array<float>(call.alibi ? call.heads : 0).read();
  Array<uint16_t> out(tokens * call.heads * call.value_dim);
  Array<float> lse(tokens * call.heads);

  params.query = query.data(), params.key = key.data(), params.value = value.data();
  if (call.apart) params.new_key = new_key.data(), params.new_value = new_value.data();
  params.cache = static_cast<CacheType>(call.cache);
  params.key_scale_by_page = params.value_scale_by_page = call.by_page;
  if (call.cache != 0) params.key_scale = key_scale.data(), params.value_scale = value_scale.data();
  params.query_strides = shape(call.tokens, call.heads, call.head_dim, false);
  params.key_strides = shape(call.page_size, call.kv_heads, call.head_dim, call.heads_first);
  params.value_strides = shape(call.page_size, call.kv_heads, call.value_dim, call.heads_first);
  params.new_key_strides = shape(call.tokens, call.kv_heads, call.head_dim, false);
  params.new_value_strides = shape(call.tokens, call.kv_heads, call.value_dim, false);
  params.out_strides = shape(call.tokens, call.heads, call.value_dim, false);
  params.lse_strides = shape(call.tokens, call.heads, 1, false);
  params.q_spans = {bounds.data(), 1};
  params.block_tables = tables.data(), params.seq_lens = lengths.data(), params.window = window.data();
  params.scale = &call.scale;
  params.sinks = call.sinks ? sinks.data() : nullptr;
  params.alibi = call.alibi ? alibi.data() : nullptr;
  params.softcap = call.softcap ? call.cap : 0.0f;
  params.out = out.data(), params.lse = lse.data();
  params.batch = 1, params.q_len = call.tokens, params.kv_len = call.page_size;
  params.num_pages = call.num_pages, params.page_size = call.page_size, params.max_pages = call.max_pages;
  params.num_seqs = params.seqs_per_batch = call.num_seqs;
  params.num_heads = call.heads, params.num_kv_heads = call.kv_heads;
  params.group = call.heads / call.kv_heads;
  params.head_dim = call.head_dim, params.value_dim = call.value_dim;
  params.ends_aligned = true;
  params.skip_rows = call.skip_rows;
  attention::sm90::with_shape(call.head_dim, call.value_dim, 0, [&](auto shape) {
    attention::sm90::with_feed<decltype(shape)>(params, [&](auto fed) {
      if (call.fp16) run<__half, decltype(fed)>(params, call);
      if (!call.fp16) run<__nv_bfloat16, decltype(fed)>(params, call);
    });
    return 0;
  });
  out.write();
  lse.write();
}
