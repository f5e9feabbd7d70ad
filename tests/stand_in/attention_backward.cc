// Attention's backward kernel on the host, for test_attention_backward_on_host.py: a call from standard
// input, its results to standard output.
#include "arrays.h"
#include "attention/sm90/backward/finish/kernel.h"
#include "attention/sm90/backward/launch_impl.h"
#include "attention/sm90/backward/prepare/kernel.h"
#include "attention/sm90/backward/shapes.h"
#include "tensor_maps.h"

namespace pallas_attn::attention::sm90::backward {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

struct Call {
  int fp16, batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim;
  int heads_first, left, right, offset, together, ctas;
  int documents;  // rows of their tables; 0: none
  int ordered;
  float scale, cap;
};

template <typename Element, typename Shape>
void run(BackwardParams& params, const Call& call) {
  using namespace attention::sm90::backward;
  const size_t rows = size_t{1} * call.batch * call.heads * call.q_len;
  params.max_tiles = params.max_turns = call.batch * (call.q_len + call.kv_len + 1);
  Array<float> sums(rows * Shape::kSumColumns);
  Array<int> turns(size_t{1} * params.max_turns * call.heads);
  Array<KeyTile> tiles(params.max_tiles);
  BackwardCounters counters;
  params.sums = sums.data();
  if (!params.ordered) std::fill_n(sums.data(), rows * Shape::kSumColumns, 0.0f);
  params.turns = turns.data(), params.tiles = tiles.data(), params.counters = &counters;
  PrepareScratch scratch;
  stand_in::shared = shared_memory;
  stand_in::threads = kPrepareThreads;
  stand_in::run_grid(dim3(1), 1, [&] { prepare(params, {Shape::kQueries, Shape::kKeys}, scratch); });
  Maps maps;
  encode_maps<Element, Shape>(params, &maps);
  stand_in::threads = Shape::kThreads;
  stand_in::run_grid(dim3(call.ctas), 1, [&] { backward_kernel<Element, Shape>(params, maps); });
  stand_in::threads = kFinishWarps * 32;
  const auto units = static_cast<int>(finish_units(params));
  stand_in::run_grid(dim3(ceil_div(units, kFinishWarps)), 1, [&] { finish<Element>(params, Shape::kDim); });
}

}  // namespace

int main() {
  stand_in::late_products = true;
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  const auto strides = [&](int tokens, int heads, int dim) -> Strides {
    const int64_t head = call.heads_first ? int64_t{tokens} * dim : dim,
                  token = call.heads_first ? dim : heads * dim;
    return {head, token, int64_t{tokens} * heads * dim};
  };
  BackwardParams params = {};
  const size_t queries = size_t{1} * call.batch * call.q_len * call.heads;
  const size_t keys = size_t{1} * call.batch * call.kv_len * call.kv_heads;
  auto query = Array<uint16_t>(queries * call.head_dim).read();
  auto key = Array<uint16_t>(keys * call.head_dim).read();
  auto value = Array<uint16_t>(keys * call.value_dim).read();
  auto d_out = Array<uint16_t>(queries * call.value_dim).read();
  auto maximum = Array<float>(queries).read();
  auto rest = Array<float>(queries).read();
  auto delta = Array<float>(queries).read();
  auto total = Array<float>(queries).read();
  const size_t table = size_t{1} * call.batch * call.documents * kDocumentStep;
  auto q_table = Array<int>(table).read();
  auto k_table = Array<int>(table).read();
  auto q_ranks = Array<int>(table == 0 ? 0 : call.batch * call.q_len).read();
  auto k_ranks = Array<int>(table == 0 ? 0 : call.batch * call.kv_len).read();
  Array<uint16_t> d_query(queries * call.head_dim), d_key(keys * call.head_dim),
      d_value(keys * call.value_dim);
  params.query = query.data(), params.key = key.data(), params.value = value.data();
  params.d_out = d_out.data();
  params.query_strides = strides(call.q_len, call.heads, call.head_dim);
  params.key_strides = strides(call.kv_len, call.kv_heads, call.head_dim);
  params.value_strides = strides(call.kv_len, call.kv_heads, call.value_dim);
  params.out_strides = strides(call.q_len, call.heads, call.value_dim);
  params.maximum = maximum.data(), params.rest = rest.data();
  params.delta = delta.data(), params.total = total.data();
  params.d_query = d_query.data(), params.d_key = d_key.data(), params.d_value = d_value.data();
  params.batch = call.batch, params.q_len = call.q_len, params.kv_len = call.kv_len;
  params.num_heads = call.heads, params.num_kv_heads = call.kv_heads;
  params.group = call.heads / call.kv_heads;
  params.head_dim = call.head_dim, params.value_dim = call.value_dim;
  params.left = call.left, params.right = call.right, params.offset = call.offset;
  params.heads_together = call.together;
  params.ordered = call.ordered != 0;
  params.seqs_per_batch = 1;
  if (table > 0) {
    params.q_spans = {q_table.data(), kDocumentStep}, params.k_spans = {k_table.data(), kDocumentStep};
    params.q_ranks = q_ranks.data(), params.k_ranks = k_ranks.data();
    params.seqs_per_batch = call.documents;
  }
  params.scale = call.scale, params.softcap = call.cap;
  attention::sm90::backward::with_shape(call.head_dim, call.value_dim, 0, [&](auto shape) {
    if (call.fp16) run<__half, decltype(shape)>(params, call);
    if (!call.fp16) run<__nv_bfloat16, decltype(shape)>(params, call);
    return 0;
  });
  d_query.write();
  d_key.write();
  d_value.write();
}
