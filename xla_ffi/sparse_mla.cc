// FFI handler of the sparse MLA kernels for sm_90: unpack, check, fill the parameters, launch.
#include <cuda_runtime.h>

#include <cmath>

#include "checks.h"
#include "common/math.h"
#include "device_guard.h"
#include "mla/sm90/sparse/launch.h"
#include "mla/sparse_params.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_sparse_mla_sm90";
constexpr int64_t kTokenBytes = 656;

ffi::Error sparse_mla(cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer pool,
                      ffi::AnyBuffer indices, ffi::AnyBuffer lengths, ffi::AnyBuffer block_tables,
                      ffi::AnyBuffer schedule_metadata, ffi::AnyBuffer num_splits, ffi::AnyBuffer sinks,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                      ffi::Result<ffi::AnyBuffer> max_logits, ffi::Result<ffi::AnyBuffer> partial_out,
                      ffi::Result<ffi::AnyBuffer> partial_lse, float scale, int64_t page_size,
                      bool skip_all_outside, bool cooperative) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, mla::kQueryDim}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  const int64_t tokens = query.dimensions()[0];
  const int64_t heads = query.dimensions()[1];
  check.require(tokens > 0 && heads > 0, "query", "at least one token and head", "none");

  const bool fp8 = pool.element_type() == DataType::U8;
  const DataType stored = fp8 && dtype == DataType::BF16 ? DataType::U8 : dtype;
  check.array("pool", pool, {-1, fp8 ? kTokenBytes : mla::kQueryDim}, {stored});
  check.array("indices", indices, {tokens, -1}, {DataType::S32});
  check.array("lengths", lengths, {tokens}, {DataType::S32});
  check.array("block_tables", block_tables, {-1, -1}, {DataType::S32});
  check.array("schedule_metadata", schedule_metadata, {-1, mla::kScheduleFields}, {DataType::S32});
  check.array("num_splits", num_splits, {tokens + 1}, {DataType::S32});
  check.array("sinks", sinks, {sinks.element_count() > 0 ? heads : 0}, {DataType::F32});
  check.array("max_logits", *max_logits, {-1, -1}, {DataType::F32});
  check.array("partial_out", *partial_out, {-1, heads, mla::kLatentDim}, {DataType::F32});
  check.require(scale > 0.0f && std::isfinite(scale), "scale", "a positive, finite number",
                std::to_string(scale));
  if (!check.ok()) return check.error();

  const int64_t rows = pool.dimensions()[0];
  const int64_t topk = indices.dimensions()[1];
  const int64_t tables = block_tables.dimensions()[0], columns = block_tables.dimensions()[1];
  const int64_t parts = schedule_metadata.dimensions()[0];
  const int64_t partials = partial_out->dimensions()[0];
  const bool wants_max = max_logits->element_count() > 0;
  check.between("pool", " rows", 1, kMaxInt, rows);
  check.between("query", " tokens", 1, kMaxInt, tokens);
  // A tile more is counted through than there is.
  check.between("indices", " ids a token", 1, kMaxInt - 4 * mla::kPageTokens, topk);
  constexpr int64_t kMaxGridY = 65535;
  check.between("schedule_metadata", " parts", 1, kMaxGridY, parts);
  check.between("page_size", "", 0, kMaxInt, page_size);
  if (page_size > 0) {
    check.require(tables > 0 && columns > 0 && tokens % tables == 0, "block_tables",
                  "a table for every so many of " + std::to_string(tokens) + " tokens",
                  std::to_string(tables) + " of " + std::to_string(columns) + " pages");
    check.between("block_tables", " pages a table", 1, kMaxInt, columns);
  }
  check.require(partials == 0 || partials == 2 * parts, "partial_out",
                "none, or two for each of " + std::to_string(parts) + " parts", std::to_string(partials));
  check.require(!wants_max || partials == 0, "max_logits", "none where tokens may be cut", "some");
  check.array("partial_lse", *partial_lse, {partials, heads, 2}, {DataType::F32});
  check.array("out", *out, {tokens, heads, mla::kLatentDim}, {dtype});
  check.array("lse", *lse, {tokens, heads}, {DataType::F32});
  if (wants_max) check.array("max_logits", *max_logits, {tokens, heads}, {DataType::F32});
  if (!check.ok()) return check.error();

  mla::SparseParams params = {};
  params.query = query.untyped_data();
  params.latent_cache = pool.untyped_data();
  params.indices = indices.typed_data<int32_t>();
  params.seq_lens = lengths.typed_data<int32_t>();
  params.block_tables = block_tables.typed_data<int32_t>();
  params.schedule = schedule_metadata.typed_data<int32_t>();
  params.num_splits = num_splits.typed_data<int32_t>();
  params.sinks = sinks.element_count() > 0 ? sinks.typed_data<float>() : nullptr;
  params.out = out->untyped_data();
  params.lse = lse->typed_data<float>();
  params.max_logits = wants_max ? max_logits->typed_data<float>() : nullptr;
  params.partial_out = partials > 0 ? partial_out->typed_data<float>() : nullptr;
  params.partial_lse = partials > 0 ? reinterpret_cast<RowLse*>(partial_lse->typed_data<float>()) : nullptr;
  params.batch = static_cast<int>(tokens);
  params.query_len = 1;
  params.num_kv_heads = 1;
  params.group = static_cast<int>(heads);
  params.max_blocks = ceil_div(static_cast<int>(topk), mla::kPageTokens);
  params.num_sm_parts = static_cast<int>(parts);
  params.scale = scale;
  params.merge_apart = !cooperative;
  params.element = dtype == DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;
  params.topk = static_cast<int>(topk);
  params.set_pool(static_cast<int>(rows), static_cast<int>(page_size));
  params.table_columns = static_cast<int>(columns);
  params.tokens_a_table = page_size > 0 ? static_cast<int>(tokens / tables) : 1;
  params.skip_all_outside = skip_all_outside;
  params.nothing_is_cut = partials == 0;
  params.format = fp8 ? mla::RowFormat::kFp8 : mla::RowFormat::kPlain;

  return launched(kName, device, stream, mla::sm90::launch_sparse, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_sparse_mla_sm90, pallas_attn::sparse_mla,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // pool
                                  .Arg<xla::ffi::AnyBuffer>()  // indices
                                  .Arg<xla::ffi::AnyBuffer>()  // lengths
                                  .Arg<xla::ffi::AnyBuffer>()  // block_tables
                                  .Arg<xla::ffi::AnyBuffer>()  // schedule_metadata
                                  .Arg<xla::ffi::AnyBuffer>()  // num_splits
                                  .Arg<xla::ffi::AnyBuffer>()  // sinks
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // max_logits
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_out
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_lse
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("page_size")
                                  .Attr<bool>("skip_all_outside")
                                  .Attr<bool>("cooperative"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
