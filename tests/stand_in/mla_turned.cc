// The decode kernel over tokens of 656 bytes, on the host: a call from standard input, which
// test_mla_bytes_on_host.py writes, its result to standard output.
#include "arrays.h"
#include "mla/sm90/turned/all_tokens.h"
#include "mla/sm90/turned/kernel.h"

namespace pallas_attn::mla::sm90::turned {
alignas(1024) char shared_memory[stand_in::kSharedBytes];
}

namespace {

using namespace pallas_attn;
using stand_in::Array;

struct Call {
  int batch, query_len, num_kv_heads, group, num_pages, max_blocks, num_sm_parts, causal, merging;
  float scale;
};

}  // namespace

int main() {
  stand_in::shared = mla::sm90::turned::shared_memory;
  Call call;
  if (std::fread(&call, sizeof(call), 1, stdin) != 1) stand_in::fail("no call");
  mla::DecodeParams params = {};
  params.batch = call.batch, params.query_len = call.query_len, params.num_kv_heads = call.num_kv_heads;
  params.group = call.group, params.num_pages = call.num_pages, params.max_blocks = call.max_blocks;
  params.num_sm_parts = call.num_sm_parts, params.causal = call.causal, params.scale = call.scale;
  params.format = mla::LatentFormat::kBytes;
  const size_t rows = static_cast<size_t>(call.batch) * params.all_rows();
  const size_t slots = static_cast<size_t>(params.num_slots()) * params.all_rows();
  const size_t tokens = static_cast<size_t>(call.num_pages) * mla::kPageTokens * call.num_kv_heads;
  auto query = Array<uint16_t>(rows * mla::kQueryDim).read();
  auto cache = Array<char>(tokens * mla::kTokenBytes).read();
  auto tables = Array<int>(static_cast<size_t>(call.batch) * call.max_blocks).read();
  auto lengths = Array<int>(call.batch).read();
  auto schedule = Array<int>(call.num_sm_parts * mla::kScheduleFields).read();
  auto splits = Array<int>(call.batch + 1).read();
  Array<uint16_t> out(rows * mla::kLatentDim);
  Array<float> lse(rows), partial_out(slots * mla::kLatentDim), partial_lse2(slots);
  params.query = query.data(), params.latent_cache = cache.data(), params.block_tables = tables.data();
  params.seq_lens = lengths.data(), params.schedule = schedule.data(), params.num_splits = splits.data();
  params.out = out.data(), params.lse = lse.data();
  params.partial_out = partial_out.data(), params.partial_lse2 = partial_lse2.data();

  namespace turned = mla::sm90::turned;
  const dim3 grid((params.rows() + 63) / 64, call.num_sm_parts, call.num_kv_heads);
  stand_in::run_grid(grid, mla::sm90::kConsumerThreads, [&] {
    const auto merging = static_cast<mla::Merging>(call.merging);
    if (params.rows() <= 16) return turned::turned_decode_kernel<turned::AllTokens, 16>(params, merging);
    if (params.rows() <= 32) return turned::turned_decode_kernel<turned::AllTokens, 32>(params, merging);
    turned::turned_decode_kernel<turned::AllTokens, 64>(params, merging);
  });
  out.write();
  lse.write();
}
