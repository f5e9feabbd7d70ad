// FFI handler of attention's forward pass for sm_90: unpack, check, fill the parameters, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "attention/params.h"
#include "attention/prepare/prepare.h"
#include "attention/sm90/forward/launch.h"
#include "attention_call.h"
#include "attention_heads.h"
#include "checks.h"
#include "common/math.h"
#include "device_guard.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using attention::ForwardParams;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_attention_forward_sm90";

ffi::Error attention_forward(cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer key,
                             ffi::AnyBuffer value, ffi::AnyBuffer q_bounds, ffi::AnyBuffer k_bounds,
                             ffi::AnyBuffer q_ranks, ffi::AnyBuffer k_ranks, ffi::AnyBuffer block_tables,
                             ffi::AnyBuffer seq_lens, ffi::AnyBuffer num_seqs, ffi::AnyBuffer window,
                             ffi::AnyBuffer scale, ffi::AnyBuffer sinks, ffi::AnyBuffer alibi,
                             ffi::AnyBuffer key_scale, ffi::AnyBuffer value_scale, ffi::AnyBuffer new_key,
                             ffi::AnyBuffer new_value, ffi::AnyBuffer kept_out, ffi::AnyBuffer kept_lse,
                             ffi::AnyBuffer taken, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> rest,
                             ffi::Result<ffi::AnyBuffer> low, ffi::Result<ffi::AnyBuffer> counters,
                             ffi::Result<ffi::AnyBuffer> items, ffi::Result<ffi::AnyBuffer> split_tiles,
                             ffi::Result<ffi::AnyBuffer> first_tile, ffi::Result<ffi::AnyBuffer> partial_out,
                             ffi::Result<ffi::AnyBuffer> partial_lse, bool query_heads_first,
                             bool key_heads_first, bool lse_heads_first, bool base2_lse, bool ends_aligned,
                             bool sinks_without_keys, int64_t q_offset, int64_t bounds_step, int64_t seqs,
                             int64_t skip_rows, int64_t keys_in_l2, float softcap) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, -1, -1}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  check.array("key", key, {-1, -1, -1, -1}, {dtype, DataType::F8E4M3FN, DataType::S8});
  if (!check.ok()) return check.error();
  const DataType stored = key.element_type();
  check.array("value", value, {-1, -1, -1, -1}, {stored});
  if (!check.ok()) return check.error();
  const Heads queries = Heads::of(query, query_heads_first), keys = Heads::of(key, key_heads_first);
  Heads values = keys;
  values.dim = value.dimensions()[3];
  check.array("value", value, values.shape(), {stored});
  Heads outs = queries;
  outs.dim = values.dim;
  const Heads lses = {queries.batch, queries.tokens, queries.heads, 0, lse_heads_first};
  check.array("key", key, {-1, -1, -1, queries.dim}, {stored});
  const ForwardCall call = {query, key, value,    q_bounds, k_bounds, window, scale,  sinks, out, lse,
                            rest,  low, counters, items,    queries,  keys,   values, outs,  lses};
  call.check(check);
  check.array("split_tiles", *split_tiles, {-1, 8}, {DataType::S32});
  check.array("alibi", alibi, {alibi.element_count() == 0 ? 0 : queries.heads}, {DataType::F32});
  check.array("block_tables", block_tables, {-1, -1}, {DataType::S32});
  if (!check.ok()) return check.error();
  const bool paged = block_tables.element_count() > 0;
  const bool of_bytes = stored != dtype;
  check.require(paged || !of_bytes, "key", "a cache in pages of one byte a number", "rows");
  // Of heads, rows may have them too, which were made of bytes; not where documents lie scattered, nor beside
  // what gradients need.
  const bool plain_rows = !paged && q_ranks.element_count() == 0 && rest->element_count() == 0;
  for (const auto& [name, scales] : {std::pair{"key_scale", key_scale}, {"value_scale", value_scale}}) {
    const bool by_page = of_bytes && scales.dimensions().size() == 2;
    const bool of_heads = of_bytes || (plain_rows && scales.element_count() > 0);
    const std::vector<int64_t> shape = by_page ? std::vector<int64_t>{keys.batch, keys.heads}
                                               : std::vector<int64_t>{of_heads ? keys.heads : 0};
    check.array(name, scales, shape, {DataType::F32});
  }
  const bool apart = new_key.element_count() > 0;
  if (apart) {
    Heads new_keys = {queries.batch, queries.tokens, keys.heads, queries.dim, query_heads_first};
    check.array("new_key", new_key, new_keys.shape(), {dtype});
    new_keys.dim = values.dim;
    check.array("new_value", new_value, new_keys.shape(), {dtype});
    check.require(paged, "new_key", "nothing beside keys in rows", "an array");
    check.require(ends_aligned, "ends_aligned", "true beside new keys", "false");
  }
  // What is kept is written over in place: XLA has given both the same memory.
  for (const auto& [name, kept, result] :
       {std::tuple{"kept_out", kept_out, out}, {"kept_lse", kept_lse, lse}}) {
    check.require(kept.element_count() == 0 || kept.untyped_data() == result->untyped_data(), name,
                  "the memory of the result", "another");
  }
  const bool documents = bounds_step == attention::kDocumentStep;
  check.require(documents || bounds_step == 1, "bounds_step", "1 or 3", std::to_string(bounds_step));
  const bool many = first_tile->element_count() > 0;
  check.between("seqs", "", 1, many ? kMostTokens : attention::kMostPreparedSeqs, seqs);
  check.array("first_tile", *first_tile, {many ? seqs + 3 : 0}, {DataType::S32});
  const int64_t bounds = documents ? 3 * seqs : seqs + 1;
  for (const auto& [name, array] : {std::pair{"q_bounds", q_bounds}, {"k_bounds", k_bounds}}) {
    check.array(name, array, {array.element_count() == 0 ? 0 : bounds}, {DataType::S32});
  }
  const bool ranked = q_ranks.element_count() > 0;
  check.require(!ranked || documents, "q_ranks", "none but of documents", "some");
  check.array("q_ranks", q_ranks, {ranked ? queries.batch * queries.tokens : 0}, {DataType::S32});
  check.array("k_ranks", k_ranks, {ranked ? keys.batch * keys.tokens : 0}, {DataType::S32});
  check.array("seq_lens", seq_lens, {paged ? seqs : 0}, {DataType::S32});
  check.array("taken", taken, {taken.element_count() == 0 ? 0 : seqs}, {DataType::S32});
  check.array("num_seqs", num_seqs, {num_seqs.element_count() == 0 ? 0 : 1}, {DataType::S32});
  if (paged)
    check.require(block_tables.dimensions()[0] == seqs, "block_tables", std::to_string(seqs) + " rows",
                  std::to_string(block_tables.dimensions()[0]));
  if (!paged) {
    check.require(keys.batch == queries.batch, "key", "a batch of " + std::to_string(queries.batch),
                  std::to_string(keys.batch));
  }
  check.require(seqs % queries.batch == 0, "seqs", "a multiple of the batch", std::to_string(seqs));
  check.require(q_bounds.element_count() > 0 || seqs == queries.batch, "q_bounds", "bounds of the sequences",
                "none");
  check.require(!documents || (q_bounds.element_count() > 0 && k_bounds.element_count() > 0), "q_bounds",
                "bounds of queries and keys", "none");
  check.require(documents || q_bounds.element_count() == 0 || queries.batch == 1, "query",
                "a batch of 1 beside lengths end to end", std::to_string(queries.batch));
  check.require(keys.heads > 0 && queries.heads > 0 && queries.heads % keys.heads == 0, "query",
                "a multiple of " + std::to_string(keys.heads) + " heads", std::to_string(queries.heads));
  check.between("query", " tokens", 1, kMostTokens, queries.tokens);
  check.between("key", " tokens or pages", 1, kMostTokens, paged ? keys.batch : keys.tokens);
  for (const auto& [name, dim] : {std::pair{"query", queries.dim}, {"value", values.dim}}) {
    const int multiple = of_bytes ? 16 : 8;
    check.require(dim > 0 && dim % multiple == 0, name,
                  "heads of a multiple of " + std::to_string(multiple) + " elements", std::to_string(dim));
  }
  if (!check.ok()) return check.error();
  const auto [least_rows, most_rows] =
      attention::sm90::tile_rows(static_cast<int>(queries.dim), static_cast<int>(values.dim));
  const int64_t group = queries.heads / keys.heads;
  check.require(least_rows > 0, "query", "heads of at most 256 elements", std::to_string(queries.dim));
  check.require(group <= least_rows, "query",
                "at most " + std::to_string(least_rows) + " heads for a KV head", std::to_string(group));
  check.between("keys_in_l2", "", 1, kMaxInt, keys_in_l2);
  if (!check.ok()) return check.error();
  const int64_t most_items = items->dimensions()[0];
  const int64_t partials = split_tiles->dimensions()[0];
  int64_t needed = partials + queries.batch * (queries.tokens / (least_rows / group) + 1) +
                   (q_bounds.element_count() > 0 ? seqs + 2 : 0);
  // None without a query of its document's.
  if (documents) needed = std::min(needed, partials + queries.batch * queries.tokens);
  check.array("partial_out", *partial_out, {partials, keys.heads, most_rows, values.dim}, {DataType::F32});
  check.array("partial_lse", *partial_lse, {partials, keys.heads, most_rows, 2}, {DataType::F32});
  check.between("items", " work items", needed, kMaxInt / 2 / keys.heads, most_items);
  if (!check.ok()) return check.error();

  ForwardParams params = call.filled(seqs);
  params.cache = !of_bytes                ? attention::CacheType::kElement
                 : stored == DataType::S8 ? attention::CacheType::kInt8
                                          : attention::CacheType::kE4m3;
  params.key_scale = optional<float>(key_scale);
  params.value_scale = optional<float>(value_scale);
  params.key_scale_by_page = key_scale.dimensions().size() == 2;
  params.value_scale_by_page = value_scale.dimensions().size() == 2;
  params.new_key = optional<void>(new_key);
  params.new_value = optional<void>(new_value);
  if (apart) {
    Heads new_keys = {queries.batch, queries.tokens, keys.heads, queries.dim, query_heads_first};
    params.new_key_strides = new_keys.strides();
    new_keys.dim = values.dim;
    params.new_value_strides = new_keys.strides();
  }
  params.q_spans.step = params.k_spans.step = static_cast<int>(bounds_step);
  params.q_ranks = optional<int>(q_ranks);
  params.k_ranks = optional<int>(k_ranks);
  params.block_tables = optional<int>(block_tables);
  params.seq_lens = optional<int>(seq_lens);
  params.num_seqs_now = optional<int>(num_seqs);
  params.taken = optional<int>(taken);
  params.alibi = optional<float>(alibi);
  params.split_tiles =
      partials > 0 ? static_cast<attention::SplitTile*>(split_tiles->untyped_data()) : nullptr;
  params.first_tile = many ? first_tile->typed_data<int>() : nullptr;
  params.partial_out = partial_out->typed_data<float>();
  params.partial_lse = static_cast<RowLse*>(partial_lse->untyped_data());
  params.max_partials = static_cast<int>(partials);
  params.num_pages = paged ? static_cast<int>(keys.batch) : 0;
  params.page_size = paged ? static_cast<int>(keys.tokens) : 0;
  params.max_pages = paged ? static_cast<int>(block_tables.dimensions()[1]) : 0;
  params.ends_aligned = ends_aligned;
  params.sinks_without_keys = sinks_without_keys;
  params.q_offset = static_cast<int>(q_offset);
  params.skip_rows = static_cast<int>(skip_rows);
  params.keys_in_l2 = static_cast<int>(keys_in_l2);
  params.softcap = softcap;
  params.base2_lse = base2_lse;
  return launched(kName, device, stream, attention::sm90::launch_forward, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_attention_forward_sm90, pallas_attn::attention_forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // q_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // k_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // q_ranks
                                  .Arg<xla::ffi::AnyBuffer>()  // k_ranks
                                  .Arg<xla::ffi::AnyBuffer>()  // block_tables
                                  .Arg<xla::ffi::AnyBuffer>()  // seq_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // num_seqs
                                  .Arg<xla::ffi::AnyBuffer>()  // window
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // sinks
                                  .Arg<xla::ffi::AnyBuffer>()  // alibi
                                  .Arg<xla::ffi::AnyBuffer>()  // key_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // value_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // new_key
                                  .Arg<xla::ffi::AnyBuffer>()  // new_value
                                  .Arg<xla::ffi::AnyBuffer>()  // kept_out
                                  .Arg<xla::ffi::AnyBuffer>()  // kept_lse
                                  .Arg<xla::ffi::AnyBuffer>()  // taken
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // rest
                                  .Ret<xla::ffi::AnyBuffer>()  // low
                                  .Ret<xla::ffi::AnyBuffer>()  // counters
                                  .Ret<xla::ffi::AnyBuffer>()  // items
                                  .Ret<xla::ffi::AnyBuffer>()  // split_tiles
                                  .Ret<xla::ffi::AnyBuffer>()  // first_tile
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_out
                                  .Ret<xla::ffi::AnyBuffer>()  // partial_lse
                                  .Attr<bool>("query_heads_first")
                                  .Attr<bool>("key_heads_first")
                                  .Attr<bool>("lse_heads_first")
                                  .Attr<bool>("base2_lse")
                                  .Attr<bool>("ends_aligned")
                                  .Attr<bool>("sinks_without_keys")
                                  .Attr<int64_t>("q_offset")
                                  .Attr<int64_t>("bounds_step")
                                  .Attr<int64_t>("seqs")
                                  .Attr<int64_t>("skip_rows")
                                  .Attr<int64_t>("keys_in_l2")
                                  .Attr<float>("softcap"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
