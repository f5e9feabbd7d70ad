// The decode kernel over tokens of 656 bytes, on the host, for test_mla_bytes_on_host.py.
#include "arrays.h"
#include "mla/sm90/transposed/all_tokens.h"
#include "transposed.h"

namespace {

using namespace pallas_attn;
using stand_in::Array;

struct Call {
  int batch, query_len, num_kv_heads, group, num_pages, max_blocks, num_sm_parts, causal, merging;
  float scale;
};

}  // namespace

int main() {
  const auto call = stand_in::read_call<Call>();
  mla::DecodeParams params = {};
  params.batch = call.batch, params.query_len = call.query_len, params.num_kv_heads = call.num_kv_heads;
  params.group = call.group, params.num_pages = call.num_pages, params.max_blocks = call.max_blocks;
  params.num_sm_parts = call.num_sm_parts, params.causal = call.causal, params.scale = call.scale;
  params.format = mla::LatentFormat::kBytes;
  const size_t rows = static_cast<size_t>(call.batch) * params.all_rows();
  const size_t tokens = static_cast<size_t>(call.num_pages) * mla::kPageTokens * call.num_kv_heads;
  auto query = Array<uint16_t>(rows * mla::kQueryDim).read();
  auto cache = Array<char>(tokens * mla::kTokenBytes).read();
  auto tables = Array<int>(static_cast<size_t>(call.batch) * call.max_blocks).read();
  auto lengths = Array<int>(call.batch).read();
  const stand_in::Schedule schedule(params);
  params.query = query.data(), params.latent_cache = cache.data(), params.block_tables = tables.data();
  params.seq_lens = lengths.data();

  stand_in::run_transposed<mla::sm90::transposed::AllTokens>(params, static_cast<mla::Merging>(call.merging));
}
