// The kernel over chosen tokens of 656 bytes, on the host: a call from standard input, which
// test_sparse_mla_bytes_on_host.py writes, its result to standard output.
#include "arrays.h"
#include "mla/sm90/turned/chosen_tokens.h"
#include "mla/sm90/turned/kernel.h"

namespace pallas_attn::mla::sm90::turned {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}

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
  stand_in::shared = mla::sm90::turned::shared_memory;
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  mla::SparseParams params = {};
  params.batch = call.tokens, params.query_len = params.num_kv_heads = 1, params.group = call.heads;
  params.max_blocks = ceil_div(call.topk, mla::kPageTokens), params.num_sm_parts = call.num_sm_parts;
  params.scale = call.scale, params.topk = call.topk;
  params.set_pool(call.rows, call.page_size);
  params.table_columns = call.table_columns, params.tokens_a_table = call.tokens / call.tables;
  params.skip_all_outside = call.skip_all_outside, params.nothing_is_cut = !call.cuts;
  params.format = mla::RowFormat::kFp8;
  const size_t rows = static_cast<size_t>(call.tokens) * call.heads;
  const size_t slots = static_cast<size_t>(params.num_slots()) * call.heads;
  auto query = Array<uint16_t>(rows * mla::kQueryDim).read();
  auto pool = Array<char>(static_cast<size_t>(call.rows) * mla::kTokenBytes).read();
  auto ids = Array<int>(static_cast<size_t>(call.tokens) * call.topk).read();
  auto lengths = Array<int>(call.tokens).read();
  auto tables = Array<int>(static_cast<size_t>(call.tables) * call.table_columns).read();
  auto schedule = Array<int>(call.num_sm_parts * mla::kScheduleFields).read();
  auto splits = Array<int>(call.tokens + 1).read();
  auto sinks = Array<float>(call.sinks ? call.heads : 0).read();
  Array<uint16_t> out(rows * mla::kLatentDim);
  Array<float> lse(rows), partial_out(slots * mla::kLatentDim), partial_lse2(slots);
  params.query = query.data(), params.latent_cache = pool.data(), params.indices = ids.data();
  params.seq_lens = lengths.data(), params.block_tables = tables.data();
  params.schedule = schedule.data(), params.num_splits = splits.data();
  params.sinks = call.sinks ? sinks.data() : nullptr;
  params.out = out.data(), params.lse = lse.data();
  params.partial_out = partial_out.data(), params.partial_lse2 = partial_lse2.data();

  namespace turned = mla::sm90::turned;
  stand_in::run_grid(dim3(ceil_div(call.heads, 64), call.num_sm_parts), mla::sm90::kConsumerThreads, [&] {
    const auto merging = call.cuts ? mla::Merging::kInside : mla::Merging::kNothingIsCut;
    if (call.heads <= 16) return turned::turned_decode_kernel<turned::ChosenTokens, 16>(params, merging);
    if (call.heads <= 32) return turned::turned_decode_kernel<turned::ChosenTokens, 32>(params, merging);
    turned::turned_decode_kernel<turned::ChosenTokens, 64>(params, merging);
  });
  out.write();
  lse.write();
}
