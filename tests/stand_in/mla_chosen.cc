// The kernel over chosen tokens of 656 bytes, on the host, for test_sparse_mla_bytes_on_host.py.
#include "arrays.h"
#include "mla/sm90/transposed/chosen_tokens.h"
#include "transposed.h"

namespace {

using namespace pallas_attn;
using stand_in::Array;

struct Call {
  int tokens, heads, topk, rows, page_size, tables, table_columns, skip_all_outside, num_sm_parts, cuts,
      sinks;
  float scale;
};

}  // namespace

int main() {
  const auto call = stand_in::read_call<Call>();
  mla::SparseParams params = {};
  params.batch = call.tokens, params.query_len = params.num_kv_heads = 1, params.group = call.heads;
  params.max_blocks = ceil_div(call.topk, mla::kPageTokens), params.num_sm_parts = call.num_sm_parts;
  params.scale = call.scale, params.topk = call.topk;
  params.set_pool(call.rows, call.page_size);
  params.table_columns = call.table_columns, params.tokens_a_table = call.tokens / call.tables;
  params.skip_all_outside = call.skip_all_outside, params.nothing_is_cut = !call.cuts;
  params.format = mla::RowFormat::kFp8;
  auto query = Array<uint16_t>(static_cast<size_t>(call.tokens) * call.heads * mla::kQueryDim).read();
  auto pool = Array<char>(static_cast<size_t>(call.rows) * mla::kTokenBytes).read();
  auto ids = Array<int>(static_cast<size_t>(call.tokens) * call.topk).read();
  auto lengths = Array<int>(call.tokens).read();
  auto tables = Array<int>(static_cast<size_t>(call.tables) * call.table_columns).read();
  const stand_in::Schedule schedule(params);
  auto sinks = Array<float>(call.sinks ? call.heads : 0).read();
  params.query = query.data(), params.latent_cache = pool.data(), params.indices = ids.data();
  params.seq_lens = lengths.data(), params.block_tables = tables.data();
  params.sinks = call.sinks ? sinks.data() : nullptr;

  const auto merging = call.cuts ? mla::Merging::kInside : mla::Merging::kNothingIsCut;
  stand_in::run_transposed<mla::sm90::transposed::ChosenTokens>(params, merging);
}
