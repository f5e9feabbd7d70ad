// Attention's backward kernel on the host, for test_attention_backward_on_host.py: a call from standard
// input, its results to standard output.
#include "arrays.h"
#include "attention/sm90/backward/finish/kernel.h"
#include "attention/sm90/backward/launch_impl.h"
#include "attention/sm90/backward/prepare/kernel.h"
#include "attention/sm90/backward/shapes.h"
#include "attention/sm90/backward/wide/launch_impl.h"
#include "tensor_maps.h"

namespace pallas_attn::attention::sm90::backward {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
namespace wide {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}
}  // namespace pallas_attn::attention::sm90::backward

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;
using stand_in::Array;

struct Call {
  int fp16, batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim;
  int heads_first, left, right, offset, together, ctas;
  int documents;  // rows of their tables; 0: none
  int ordered;
  // A mask: of its lists, and how many pairs of blocks have bits; 0: none.
  int list_batch, list_heads, block_q, block_kv, max_bits;
  // A layout: of its rows, and blocks of keys; 0: none. Documents have no ranks beside it.
  int layout_heads, layout_rows, layout_columns, layout_pitch;
  int alibi;
  float scale, cap;
};

// As many as callers make room for.
int most_tiles(const Call& call, int tokens, int rows) {
  return call.batch * (call.documents > 0 ? tokens : ceil_div(tokens, rows));
}

void prepare_lists(const BackwardParams& params, const attention::sm90::backward::Tiling& tiling) {
  using namespace attention::sm90::backward;
  static PrepareScratch scratch[1 + kZeroingBlocks];
  stand_in::shared = shared_memory;
  stand_in::threads = kPrepareThreads;
  stand_in::run_grid(dim3(1 + (tiling.queries > 0 ? 1 : kZeroingBlocks)), 1,
                     [&] { prepare(params, tiling, scratch[ptx::block_x()]); });
}

template <typename Element, typename Shape>
void run(BackwardParams& params, const Call& call) {
  using namespace attention::sm90::backward;
  Array<ListedTile> key_tiles(most_tiles(call, call.kv_len, Shape::kKeys));
  BackwardCounters counters[kMostPasses];
  params.key_tiles = key_tiles.data(), params.counters = counters;
  const size_t rows = size_t{1} * call.batch * call.heads * call.q_len;
  Array<float> sums(rows * Shape::kSumColumns);
  Array<int> turns(rows);
  params.sums = sums.data(), params.turns = turns.data();
  if (!params.ordered) std::fill_n(sums.data(), rows * Shape::kSumColumns, 0.0f);
  prepare_lists(params, {Shape::kKeys, 0});
  if (counters[0].tiles > static_cast<int>(key_tiles.size())) stand_in::fail("too many tiles");
  Maps maps;
  stand_in::shared = shared_memory;
  encode_maps<Element>(params, Shape::kQueries, Shape::kKeys, &maps);
  stand_in::threads = Shape::kThreads;
  stand_in::run_grid(dim3(call.ctas), 1, [&] { backward_kernel<Element, Shape>(params, maps); });
  stand_in::threads = kFinishWarps * 32;
  const auto units = static_cast<int>(finish_units(params));
  stand_in::run_grid(dim3(ceil_div(units, kFinishWarps)), 1, [&] { finish<Element>(params, Shape::kDim); });
}

template <typename Element, typename Shape>
void run_passes(BackwardParams& params, const Call& call) {
  using namespace attention::sm90::backward;
  Array<ListedTile> key_tiles(most_tiles(call, call.kv_len, wide::kHeld));
  Array<ListedTile> query_tiles(most_tiles(call, call.q_len, wide::kHeld));
  BackwardCounters counters[kMostPasses];
  params.key_tiles = key_tiles.data(), params.query_tiles = query_tiles.data(), params.counters = counters;
  prepare_lists(params, {wide::kHeld, wide::kHeld});
  Maps maps;
  stand_in::shared = wide::shared_memory;
  encode_maps<Element>(params, wide::kMet, wide::kMet, &maps);
  stand_in::threads = wide::kThreads;
  wide::each_pass<Shape>([&](auto pass) {
    stand_in::run_grid(dim3(call.ctas), 1,
                       [&] { wide::backward_kernel<Element, decltype(pass)>(params, maps); });
  });
}

// As many as there are.
struct ReadLists {
  Array<ListedBlock> blocks;
  Array<int> counts;
  BlockLists lists;

  ReadLists(const Call& call, int rows, int pitch)
      : blocks(Array<ListedBlock>(lists_of(call) * rows * pitch).read()),
        counts(Array<int>(lists_of(call) * rows).read()) {
    lists = {blocks.data(), counts.data(), call.list_batch, call.list_heads, rows, pitch};
  }

 private:
  static size_t lists_of(const Call& call) { return size_t{1} * call.list_batch * call.list_heads; }
};

struct ReadRows {
  Array<int> pointers, blocks;
  SparseRows rows;

  ReadRows(const Call& call, int count)
      : pointers(Array<int>(size_t{1} * call.layout_heads * (count + 1)).read()),
        blocks(Array<int>(size_t{1} * call.layout_heads * call.layout_pitch).read()) {
    rows = {pointers.data(), blocks.data(), call.layout_heads, count, call.layout_pitch};
  }
};

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
  auto alibi = Array<float>(call.alibi ? call.heads : 0).read();
  const size_t table = size_t{1} * call.batch * call.documents * kDocumentStep;
  auto q_table = Array<int>(table).read();
  auto k_table = Array<int>(table).read();
  const bool of_layout = call.layout_heads > 0, ranked = table > 0 && !of_layout;
  auto q_ranks = Array<int>(ranked ? call.batch * call.q_len : 0).read();
  auto k_ranks = Array<int>(ranked ? call.batch * call.kv_len : 0).read();
  const bool listed = call.max_bits > 0;
  const int rows = listed ? ceil_div(call.q_len, call.block_q) : 0;
  const int columns = listed ? ceil_div(call.kv_len, call.block_kv) : 0;
  ReadLists of_keys(call, columns, rows), of_queries(call, rows, columns);
  auto bits =
      Array<uint32_t>(listed ? size_t{1} * call.max_bits * call.block_q * call.block_kv / 32 : 0).read();
  if (listed) {
    params.of_keys = of_keys.lists, params.of_queries = of_queries.lists;
    params.bits = bits.data(), params.max_bits = call.max_bits;
  }
  ReadRows rows_of_keys(call, call.layout_columns), rows_of_queries(call, call.layout_rows);
  if (of_layout) params.rows_of_keys = rows_of_keys.rows, params.rows_of_queries = rows_of_queries.rows;
  if (listed || of_layout) {
    params.q_shift = highest_bit(call.block_q), params.k_shift = highest_bit(call.block_kv);
  }
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
  if (call.alibi) params.alibi = alibi.data();
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
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Shape::kPasses == 1) {
      call.fp16 ? run<__half, Shape>(params, call) : run<__nv_bfloat16, Shape>(params, call);
    } else {
      call.fp16 ? run_passes<__half, Shape>(params, call) : run_passes<__nv_bfloat16, Shape>(params, call);
    }
    return 0;
  };
  using namespace attention::sm90::backward;
  if (listed) {
    with_listed_shape<wide::Meets::kListed>(call.head_dim, call.value_dim, 0, launch);
  } else if (of_layout) {
    with_listed_shape<wide::Meets::kRows>(call.head_dim, call.value_dim, 0, launch);
  } else {
    with_shape(call.head_dim, call.value_dim, 0, launch);
  }
  d_query.write();
  d_key.write();
  d_value.write();
}
