// Attention's forward kernel where lists name the keys, on the host, for test_attention_lists_on_host.py: a
// call from standard input, its result to standard output.
#include "arrays.h"
#include "attention/lists.h"
#include "attention/prepare/order_lists.h"
#include "attention/prepare/unite.h"
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
  int fp16, batch, tokens, key_tokens, heads, kv_heads, head_dim, value_dim;
  int num_seqs;  // of a layout, 0: a mask
  int list_batch, list_heads, rows, pitch, max_bits, q_shift, k_shift;
  int sinks, keep, skip_rows, ctas, heads_together, max_items;
  float scale, softcap;
};

template <typename Element, typename Shape>
void run(ForwardParams& params, const Call& call) {
  using namespace attention::sm90;
  stand_in::shared = shared_memory;
  std::vector<int> united(size_t{1} * call.list_heads * call.pitch + 1, 1 << 28);
  std::vector<UnitedRow> united_row(size_t{1} * call.list_heads * ((call.rows + 1) / 2));
  if (call.q_shift < 7) {
    params.lists.united = united.data(), params.lists.united_row = united_row.data();
    stand_in::threads = kUniteWarps * 32;
    const int warps = static_cast<int>(united_row.size());
    stand_in::run_grid(dim3(ceil_div(warps, kUniteWarps)), 1, [&] { unite_kernel(params.lists); });
  }
  constexpr int kOrdering = 128;  // threads, fewer than on the device
  params.lists.heads_together = call.heads_together;
  params.max_items = call.max_items;
  std::vector<WorkItem> items(call.max_items);
  std::vector<OrderScratch<kOrdering>> scratch(ordering_ctas(params));
  Counters counters;
  params.items = items.data(), params.counters = &counters;
  stand_in::threads = kOrdering;
  stand_in::run_grid(dim3(ordering_ctas(params)), 1,
                     [&] { order_lists<kOrdering>(params, scratch[blockIdx.x]); });
  const Boxes boxes = boxes_of<Shape>(params);
  Maps maps;
  encode_maps<Element, Shape>(params, boxes, &maps);
  stand_in::threads = Shape::kThreads;
  // As launch_listed.
  const bool usual = std::is_same_v<Element, __half> && !call.keep;
  stand_in::run_grid(dim3(call.ctas), 1, [&] {
    if (usual) forward_kernel<Element, Shape, Form::kUsual>(params, maps, boxes);
    if (!usual) forward_kernel<Element, Shape, Form::kFull>(params, maps, boxes);
  });
}

}  // namespace

int main() {
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  const bool is_layout = call.num_seqs > 0;
  const size_t rows = size_t{1} * call.batch * call.tokens * call.heads;
  const size_t keys = size_t{1} * call.batch * call.key_tokens * call.kv_heads;
  auto query = Array<uint16_t>(rows * call.head_dim).read();
  auto key = Array<uint16_t>(keys * call.head_dim).read();
  auto value = Array<uint16_t>(keys * call.value_dim).read();
  auto sinks = Array<float>(call.sinks ? call.heads : 0).read();
  const size_t bounds = is_layout ? call.num_seqs + 1 : 0,
               lists = size_t{1} * call.list_batch * call.list_heads;
  auto q_bounds = Array<int>(bounds).read();
  auto k_bounds = Array<int>(bounds).read();
  auto row_pointers = Array<int>(is_layout ? lists * (call.rows + 1) : 0).read();
  auto blocks = Array<int>(lists * (is_layout ? 1 : call.rows) * call.pitch).read();
  auto ends = Array<int>(is_layout ? 0 : lists * call.rows * 2).read();
  auto first_bits = Array<int>(is_layout ? 0 : lists * call.rows).read();
  const size_t words = (size_t{1} << (call.q_shift - 6) << (call.k_shift - 6)) * 128;
  auto bits = Array<uint32_t>(is_layout ? 0 : call.max_bits * words).read();
  Array<uint16_t> out(rows * call.value_dim);
  Array<float> lse(rows), rest(call.keep ? rows : 0);
  Array<int8_t> low(call.keep ? rows * call.value_dim : 0);

  const auto strides = [](int tokens, int heads, int dim) -> Strides {
    return {dim, int64_t{heads} * dim, int64_t{tokens} * heads * dim};
  };
  int window[2] = {-1, is_layout ? 0 : -1};
  ForwardParams params = {};
  params.query = query.data(), params.key = key.data(), params.value = value.data();
  params.query_strides = strides(call.tokens, call.heads, call.head_dim);
  params.key_strides = strides(call.key_tokens, call.kv_heads, call.head_dim);
  params.value_strides = strides(call.key_tokens, call.kv_heads, call.value_dim);
  params.out_strides = strides(call.tokens, call.heads, call.value_dim);
  params.lse_strides = strides(call.tokens, call.heads, 1);
  params.q_spans = {is_layout ? q_bounds.data() : nullptr, 1};
  params.k_spans = {is_layout ? k_bounds.data() : nullptr, 1};
  params.window = window, params.scale = &call.scale;
  params.sinks = call.sinks ? sinks.data() : nullptr;
  params.out = out.data(), params.lse = lse.data();
  if (call.keep) params.rest = rest.data(), params.low = low.data();
  params.batch = call.batch, params.q_len = call.tokens, params.kv_len = call.key_tokens;
  params.num_seqs = is_layout ? call.num_seqs : call.batch;
  params.seqs_per_batch = params.num_seqs / call.batch;
  params.num_heads = params.num_kv_heads = call.heads, params.group = 1;
  params.head_dim = call.head_dim, params.value_dim = call.value_dim;
  params.ends_aligned = is_layout;
  params.sinks_without_keys = true;
  params.skip_rows = call.skip_rows;
  params.softcap = call.softcap;
  params.base2_lse = true;
  params.lists.blocks = blocks.data();
  if (is_layout) params.lists.row_pointers = row_pointers.data();
  if (!is_layout) {
    params.lists.ends = ends.data(), params.lists.first_bits = first_bits.data();
    params.lists.bits = bits.data();
  }
  params.lists.batch = call.list_batch, params.lists.heads = call.list_heads;
  params.lists.rows = call.rows, params.lists.pitch = call.pitch, params.lists.max_bits = call.max_bits;
  params.lists.q_shift = call.q_shift, params.lists.k_shift = call.k_shift;
  params.lists.share = call.heads / call.kv_heads;
  attention::sm90::with_listed_shape(call.head_dim, call.value_dim, 0, [&](auto shape) {
    if (call.fp16) run<__half, decltype(shape)>(params, call);
    if (!call.fp16) run<__nv_bfloat16, decltype(shape)>(params, call);
    return 0;
  });
  out.write();
  lse.write();
  rest.write();
  low.write();
}
