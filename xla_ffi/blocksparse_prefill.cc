// FFI handler of block-sparse prefill for sm_90: unpack, check, fill the parameters, launch.
#include <cuda_runtime.h>

#include <cmath>
#include <utility>

#include "blocksparse/params.h"
#include "blocksparse/sm90/launch.h"
#include "checks.h"
#include "common/math.h"
#include "device_guard.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_blocksparse_prefill_sm90";
constexpr int64_t kHeadDim = 128, kTile = 128;

ffi::Error blocksparse_prefill(cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer key,
                               ffi::AnyBuffer value, ffi::AnyBuffer cu_q_lens, ffi::AnyBuffer cu_k_lens,
                               ffi::AnyBuffer row_pointers, ffi::AnyBuffer columns,
                               ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                               ffi::Result<ffi::AnyBuffer> low, ffi::Result<ffi::AnyBuffer> taken,
                               float scale, int64_t block_size, int64_t q_block_size, int64_t heads_together,
                               bool skip_single) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, kHeadDim}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  const int64_t tokens = query.dimensions()[0], heads = query.dimensions()[1];
  check.array("key", key, {-1, -1, kHeadDim}, {dtype});
  if (!check.ok()) return check.error();
  const int64_t key_tokens = key.dimensions()[0], kv_heads = key.dimensions()[1];
  check.array("value", value, {key_tokens, kv_heads, kHeadDim}, {dtype});
  check.array("cu_q_lens", cu_q_lens, {-1}, {DataType::S32});
  check.array("row_pointers", row_pointers, {-1, -1}, {DataType::S32});
  if (!check.ok()) return check.error();
  const int64_t seqs = cu_q_lens.dimensions()[0] - 1;
  const int64_t layout_heads = row_pointers.dimensions()[0], rows = row_pointers.dimensions()[1] - 1;
  check.array("cu_k_lens", cu_k_lens, {seqs + 1}, {DataType::S32});
  check.array("columns", columns, {layout_heads, -1}, {DataType::S32});
  check.array("out", *out, {tokens, heads, kHeadDim}, {dtype});
  check.array("lse", *lse, {tokens, heads, 2}, {DataType::F32});
  // Of no tokens where they are not asked for.
  const bool keeps = low->element_count() > 0;
  check.array("low", *low, {keeps ? tokens : 0, heads, kHeadDim}, {DataType::S8});
  check.array("taken", *taken, {1}, {DataType::S32});
  if (!check.ok()) return check.error();

  const int64_t num_columns = columns.dimensions()[1];
  check.between("query", " tokens", 1, kMaxInt - kTile, tokens);
  check.between("key", " tokens", 1, kMaxInt - kTile, key_tokens);
  check.require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "query",
                "a multiple of " + std::to_string(kv_heads) + " heads", std::to_string(heads));
  check.between("cu_q_lens", " sequences", 1, kMaxInt, seqs);
  check.between("row_pointers", " rows", 1, kMaxInt - 1, rows);
  check.require(layout_heads == 1 || layout_heads == heads, "row_pointers",
                "1 head or " + std::to_string(heads), std::to_string(layout_heads));
  check.between("columns", " columns", 0, kMaxInt - kTile, num_columns);
  for (const auto& [name, size] : {std::pair{"block_size", block_size}, {"q_block_size", q_block_size}}) {
    check.between(name, "", kTile, int64_t{1} << 30, size);
    check.require((size & (size - 1)) == 0, name, "a power of two", std::to_string(size));
  }
  check.require(heads_together > 0 && heads % heads_together == 0, "heads_together",
                "a divisor of " + std::to_string(heads), std::to_string(heads_together));
  check.between("query", " tiles of all heads", 1, kMaxInt / 2, (tokens / kTile + 2 * seqs + 1) * heads);
  check.require(scale > 0.0f && std::isfinite(scale), "scale", "a positive, finite number",
                std::to_string(scale));
  if (!check.ok()) return check.error();

  blocksparse::PrefillParams params = {};
  params.query = query.untyped_data();
  params.key = key.untyped_data();
  params.value = value.untyped_data();
  params.cu_q_lens = cu_q_lens.typed_data<int32_t>();
  params.cu_k_lens = cu_k_lens.typed_data<int32_t>();
  params.row_pointers = row_pointers.typed_data<int32_t>();
  params.columns = columns.typed_data<int32_t>();
  params.out = out->untyped_data();
  params.lse = reinterpret_cast<float2*>(lse->typed_data<float>());
  params.low = keeps ? low->untyped_data() : nullptr;
  params.taken = taken->typed_data<int32_t>();
  params.num_tokens = static_cast<int>(tokens);
  params.num_key_tokens = static_cast<int>(key_tokens);
  params.num_seqs = static_cast<int>(seqs);
  params.num_heads = static_cast<int>(heads);
  params.num_kv_heads = static_cast<int>(kv_heads);
  params.layout_heads = static_cast<int>(layout_heads);
  params.num_rows = static_cast<int>(rows);
  params.num_columns = static_cast<int>(num_columns);
  params.block_shift = highest_bit(static_cast<uint32_t>(block_size));
  params.q_block_shift = highest_bit(static_cast<uint32_t>(q_block_size));
  params.heads_together = static_cast<int>(heads_together);
  params.skip_single = skip_single;
  params.scale = scale;
  params.element = dtype == DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;

  return launched(kName, device, stream, blocksparse::sm90::launch_prefill, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_blocksparse_prefill_sm90, pallas_attn::blocksparse_prefill,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // cu_k_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // row_pointers
                                  .Arg<xla::ffi::AnyBuffer>()  // columns
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // low
                                  .Ret<xla::ffi::AnyBuffer>()  // taken
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("q_block_size")
                                  .Attr<int64_t>("heads_together")
                                  .Attr<bool>("skip_single"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
