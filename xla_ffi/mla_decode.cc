// FFI handler of the MLA decode kernel for sm_90: unpack, check, fill the parameters, launch.
#include <cuda_runtime.h>

#include <cmath>

#include "checks.h"
#include "device_guard.h"
#include "mla/params.h"
#include "mla/sm90/dense/launch.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_mla_decode_sm90";

ffi::Error mla_decode(cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer latent_cache,
                      ffi::AnyBuffer block_tables, ffi::AnyBuffer seq_lens, ffi::AnyBuffer schedule_metadata,
                      ffi::AnyBuffer num_splits, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> partial_out,
                      ffi::Result<ffi::AnyBuffer> partial_lse, float scale, bool causal, bool cooperative) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, -1, -1, mla::kQueryDim}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  const int64_t batch = query.dimensions()[0];
  const int64_t num_kv_heads = query.dimensions()[1];
  const int64_t query_len = query.dimensions()[2];
  const int64_t group = query.dimensions()[3];
  const int64_t rows = num_kv_heads * query_len * group;
  check.require(rows > 0 && batch > 0, "query", "at least one request, token and head", "none");

  const bool bytes = latent_cache.element_type() == DataType::U8 && dtype == DataType::BF16;
  check.array("latent_cache", latent_cache,
              {-1, mla::kPageTokens, num_kv_heads, bytes ? mla::kTokenBytes : mla::kQueryDim},
              {bytes ? DataType::U8 : dtype});
  check.array("block_tables", block_tables, {batch, -1}, {DataType::S32});
  check.array("seq_lens", seq_lens, {batch}, {DataType::S32});
  check.array("schedule_metadata", schedule_metadata, {-1, mla::kScheduleFields}, {DataType::S32});
  check.array("num_splits", num_splits, {batch + 1}, {DataType::S32});
  check.require(scale > 0.0f && std::isfinite(scale), "scale", "a positive, finite number",
                std::to_string(scale));
  if (!check.ok()) return check.error();
  const int64_t num_pages = latent_cache.dimensions()[0];
  const int64_t max_blocks = block_tables.dimensions()[1];
  const int64_t num_sm_parts = schedule_metadata.dimensions()[0];

  check.require(num_pages > 0 && num_pages <= kMaxInt, "latent_cache", "between 1 and 2^31 - 1 pages",
                std::to_string(num_pages));
  constexpr int64_t kMaxGridYZ = 65535;
  check.require(num_kv_heads <= kMaxGridYZ, "query", "at most 65535 KV heads", std::to_string(num_kv_heads));
  check.require(num_sm_parts > 0 && num_sm_parts <= kMaxGridYZ, "schedule_metadata",
                "between 1 and 65535 parts", std::to_string(num_sm_parts));
  check.array("out", *out, {batch, num_kv_heads, query_len, group, mla::kLatentDim}, {dtype});
  check.array("lse", *lse, {batch, query_len, num_kv_heads * group}, {DataType::F32});
  if (!check.ok()) return check.error();

  mla::DecodeParams params = {};
  params.query = query.untyped_data();
  params.latent_cache = latent_cache.untyped_data();
  params.block_tables = block_tables.typed_data<int32_t>();
  params.seq_lens = seq_lens.typed_data<int32_t>();
  params.schedule = schedule_metadata.typed_data<int32_t>();
  params.num_splits = num_splits.typed_data<int32_t>();
  params.out = out->untyped_data();
  params.lse = lse->typed_data<float>();
  params.partial_out = partial_out->typed_data<float>();
  params.partial_lse = reinterpret_cast<RowLse*>(partial_lse->typed_data<float>());
  params.batch = static_cast<int>(batch);
  params.query_len = static_cast<int>(query_len);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.group = static_cast<int>(group);
  params.num_pages = static_cast<int>(num_pages);
  params.max_blocks = static_cast<int>(max_blocks);
  params.num_sm_parts = static_cast<int>(num_sm_parts);
  params.scale = scale;
  params.causal = causal;
  params.merge_apart = !cooperative;
  params.element = dtype == DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;
  params.format = bytes ? mla::LatentFormat::kBytes : mla::LatentFormat::kElements;

  check.array("partial_out", *partial_out, {params.num_partials(), rows, mla::kLatentDim}, {DataType::F32});
  check.array("partial_lse", *partial_lse, {params.num_partials(), rows, 2}, {DataType::F32});
  if (!check.ok()) return check.error();

  return launched(kName, device, stream, mla::sm90::launch_dense_decode, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_mla_decode_sm90, pallas_attn::mla_decode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // latent_cache
                                  .Arg<xla::ffi::AnyBuffer>()  // block_tables
                                  .Arg<xla::ffi::AnyBuffer>()  // seq_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // schedule_metadata
                                  .Arg<xla::ffi::AnyBuffer>()  // num_splits
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_out
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_lse
                                  .Attr<float>("scale")
                                  .Attr<bool>("causal")
                                  .Attr<bool>("cooperative"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
