// FFI handler of the kernel that makes 16-bit rows of what long prompts see in a cache of bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "attention/params.h"
#include "attention/prepare/prepare.h"
#include "attention/widen/widen.h"
#include "attention_heads.h"
#include "checks.h"
#include "device_guard.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_attention_widen_sm90";
constexpr int64_t kMostGroup = 128;  // what the forward kernel takes

ffi::Error attention_widen(cudaStream_t stream, int32_t device, ffi::AnyBuffer key_cache,
                           ffi::AnyBuffer value_cache, ffi::AnyBuffer block_tables, ffi::AnyBuffer seq_lens,
                           ffi::AnyBuffer cu_q_lens, ffi::AnyBuffer num_seqs, ffi::AnyBuffer window,
                           ffi::Result<ffi::AnyBuffer> key, ffi::Result<ffi::AnyBuffer> value,
                           ffi::Result<ffi::AnyBuffer> q_bounds, ffi::Result<ffi::AnyBuffer> k_bounds,
                           ffi::Result<ffi::AnyBuffer> taken, bool heads_first, int64_t q_tokens,
                           int64_t group, int64_t least_rows, int64_t least_pairs) {
  ArgumentChecker check(kName);
  check.array("key_cache", key_cache, {-1, -1, -1, -1}, {DataType::F8E4M3FN, DataType::S8});
  if (!check.ok()) return check.error();
  const DataType stored = key_cache.element_type();
  check.array("value_cache", value_cache, {-1, -1, -1, -1}, {stored});
  check.array("key", *key, {1, -1, -1, -1}, {DataType::BF16, DataType::F16});
  check.array("block_tables", block_tables, {-1, -1}, {DataType::S32});
  if (!check.ok()) return check.error();
  const Heads keys = Heads::of(key_cache, heads_first);
  Heads values = keys;
  values.dim = value_cache.dimensions()[3];
  check.array("value_cache", value_cache, values.shape(), {stored});
  const DataType dtype = key->element_type();
  const int64_t room = key->dimensions()[2], seqs = block_tables.dimensions()[0];
  check.array("key", *key, {1, keys.heads, room, keys.dim}, {dtype});
  check.array("value", *value, {1, keys.heads, room, values.dim}, {dtype});
  check.array("seq_lens", seq_lens, {seqs}, {DataType::S32});
  check.array("cu_q_lens", cu_q_lens, {seqs + 1}, {DataType::S32});
  check.array("num_seqs", num_seqs, {1}, {DataType::S32});
  check.array("window", window, {2}, {DataType::S32});
  for (const auto& [name, bounds] : {std::pair{"q_bounds", q_bounds}, {"k_bounds", k_bounds}}) {
    check.array(name, *bounds, {1, seqs, attention::kDocumentStep}, {DataType::S32});
  }
  check.array("taken", *taken, {seqs}, {DataType::S32});
  for (const auto& [name, dim] : {std::pair{"key_cache", keys.dim}, {"value_cache", values.dim}}) {
    check.require(dim > 0 && dim % 16 == 0, name, "heads of a multiple of 16 elements", std::to_string(dim));
  }
  check.between("key_cache", " pages", 1, kMostTokens, keys.batch);
  check.between("key_cache", " tokens a page", 1, kMostTokens, keys.tokens);
  check.between("key_cache", " heads", 1, kMaxInt, keys.heads);
  check.between("block_tables", " sequences", 1, attention::kMostPreparedSeqs, seqs);
  check.between("block_tables", " pages of a sequence", 1, kMaxInt, block_tables.dimensions()[1]);
  if (!check.ok()) return check.error();
  // Sums of what sequences have, of which none has more, are ints, and so are numbers of rows.
  check.between("key", " tokens", 1, kMaxInt / std::max(seqs, keys.heads), room);
  check.between("q_tokens", "", 1, kMostTokens, q_tokens);
  check.between("group", "", 1, kMostGroup, group);
  check.between("least_rows", "", 1, kMaxInt, least_rows);
  check.between("least_pairs", "", 0, kMaxInt / seqs, least_pairs);
  if (!check.ok()) return check.error();

  attention::WidenParams params = {};
  attention::ForwardParams& call = params.call;
  call.key = key_cache.untyped_data();
  call.value = value_cache.untyped_data();
  call.key_strides = keys.strides();
  call.value_strides = values.strides();
  call.q_spans = {cu_q_lens.typed_data<int>(), 1};
  call.block_tables = optional<int>(block_tables);
  call.seq_lens = seq_lens.typed_data<int>();
  call.num_seqs_now = num_seqs.typed_data<int>();
  call.window = window.typed_data<int>();
  call.batch = 1;
  call.q_len = static_cast<int>(q_tokens);
  call.num_pages = static_cast<int>(keys.batch);
  call.page_size = static_cast<int>(keys.tokens);
  call.max_pages = static_cast<int>(block_tables.dimensions()[1]);
  call.num_seqs = call.seqs_per_batch = static_cast<int>(seqs);
  call.num_kv_heads = static_cast<int>(keys.heads);
  call.group = static_cast<int>(group);
  call.head_dim = static_cast<int>(keys.dim);
  call.value_dim = static_cast<int>(values.dim);
  call.ends_aligned = true;
  call.element = dtype == DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;
  call.cache = stored == DataType::S8 ? attention::CacheType::kInt8 : attention::CacheType::kE4m3;
  params.least_rows = static_cast<int>(least_rows);
  params.least_pairs = static_cast<int>(least_pairs);
  params.room = static_cast<int>(room);
  params.key = key->untyped_data();
  params.value = value->untyped_data();
  params.taken = taken->typed_data<int>();
  params.q_bounds = q_bounds->typed_data<int>();
  params.k_bounds = k_bounds->typed_data<int>();
  return launched(kName, device, stream, attention::launch_widen, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_attention_widen_sm90, pallas_attn::attention_widen,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // key_cache
                                  .Arg<xla::ffi::AnyBuffer>()  // value_cache
                                  .Arg<xla::ffi::AnyBuffer>()  // block_tables
                                  .Arg<xla::ffi::AnyBuffer>()  // seq_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // num_seqs
                                  .Arg<xla::ffi::AnyBuffer>()  // window
                                  .Ret<xla::ffi::AnyBuffer>()  // key
                                  .Ret<xla::ffi::AnyBuffer>()  // value
                                  .Ret<xla::ffi::AnyBuffer>()  // q_bounds
                                  .Ret<xla::ffi::AnyBuffer>()  // k_bounds
                                  .Ret<xla::ffi::AnyBuffer>()  // taken
                                  .Attr<bool>("heads_first")
                                  .Attr<int64_t>("q_tokens")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("least_rows")
                                  .Attr<int64_t>("least_pairs"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
