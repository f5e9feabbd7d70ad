// FFI handler of attention's forward pass for sm_90 where lists name the keys: unpack, check, fill the
// parameters, launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/lists.h"
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
using attention::kListedQueries;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_attention_lists_sm90";
constexpr int64_t kLeastBlock = 64, kMostBlock = int64_t{1} << 30;

// Of the lists, from their own arrays, which are checked. `queries` and `heads` are the call's.
attention::KeyLists lists_of(ArgumentChecker& check, const Heads& queries, ffi::AnyBuffer blocks,
                             ffi::AnyBuffer ends, ffi::AnyBuffer first_bits, ffi::AnyBuffer bits,
                             ffi::AnyBuffer row_pointers, ffi::AnyBuffer united, ffi::AnyBuffer united_rows,
                             int64_t block_q, int64_t block_kv) {
  attention::KeyLists lists = {};
  for (const auto& [name, size] : {std::pair{"block_q", block_q}, {"block_kv", block_kv}}) {
    check.between(name, "", kLeastBlock, kMostBlock, size);
    check.require((size & (size - 1)) == 0, name, "a power of two", std::to_string(size));
  }
  const bool is_layout = row_pointers.element_count() > 0, unites = block_q < kListedQueries;
  check.require(!unites || (is_layout && block_kv == block_q), "block_q",
                std::to_string(kListedQueries) + " and more", std::to_string(block_q));
  check.array("blocks", blocks, std::vector<int64_t>(is_layout ? 2 : 4, -1), {DataType::S32});
  if (!check.ok()) return lists;
  const auto sizes = blocks.dimensions();
  const int64_t list_batch = is_layout ? 1 : sizes[0], list_heads = sizes[is_layout ? 0 : 1];
  const int64_t pitch = sizes[is_layout ? 1 : 3];
  int64_t rows = 0, max_bits = 0;
  if (is_layout) {
    check.array("row_pointers", row_pointers, {list_heads, -1}, {DataType::S32});
    if (!check.ok()) return lists;
    rows = row_pointers.dimensions()[1] - 1;
    check.between("row_pointers", " rows", 1, kMaxInt - 1, rows);
  } else {
    rows = sizes[2];
    check.array("ends", ends, {list_batch, list_heads, rows, 2}, {DataType::S32});
    check.array("first_bits", first_bits, {list_batch, list_heads, rows}, {DataType::S32});
    check.array("bits", bits, {-1, block_q / 64, block_kv / 64, 128}, {DataType::S32});
    if (!check.ok()) return lists;
    max_bits = bits.dimensions()[0];
    check.between("bits", " blocks", 1, kMaxInt, max_bits);
    check.between("blocks", " queries", queries.tokens, kMaxInt, rows * block_q);
    check.between("blocks", " keys", 1, kMaxInt, pitch * block_kv);
  }
  check.require(list_batch == 1 || list_batch == queries.batch, "blocks",
                "a batch of 1 or " + std::to_string(queries.batch), std::to_string(list_batch));
  check.require(list_heads == 1 || list_heads == queries.heads, "blocks",
                "1 head or " + std::to_string(queries.heads), std::to_string(list_heads));
  check.between("blocks", " entries", 0, kMaxInt, pitch);
  check.array("united", united, {unites ? list_heads : 0, pitch}, {DataType::S32});
  check.array("united_rows", united_rows, {unites ? list_heads : 0, (rows + 1) / 2, 5}, {DataType::S32});
  lists.blocks = blocks.typed_data<int32_t>();
  if (is_layout) {
    lists.row_pointers = row_pointers.typed_data<int32_t>();
    if (unites) {
      lists.united = united.typed_data<int32_t>();
      lists.united_row = static_cast<attention::UnitedRow*>(united_rows.untyped_data());
    }
  } else {
    lists.ends = ends.typed_data<int32_t>();
    lists.first_bits = first_bits.typed_data<int32_t>();
    lists.bits = static_cast<const uint32_t*>(bits.untyped_data());
  }
  lists.batch = static_cast<int>(list_batch), lists.heads = static_cast<int>(list_heads);
  lists.rows = static_cast<int>(rows), lists.pitch = static_cast<int>(pitch);
  lists.max_bits = static_cast<int>(max_bits);
  lists.q_shift = highest_bit(static_cast<uint32_t>(block_q));
  lists.k_shift = highest_bit(static_cast<uint32_t>(block_kv));
  return lists;
}

ffi::Error attention_lists(cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer key,
                           ffi::AnyBuffer value, ffi::AnyBuffer q_bounds, ffi::AnyBuffer k_bounds,
                           ffi::AnyBuffer blocks, ffi::AnyBuffer ends, ffi::AnyBuffer first_bits,
                           ffi::AnyBuffer bits, ffi::AnyBuffer row_pointers, ffi::AnyBuffer window,
                           ffi::AnyBuffer scale, ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> out,
                           ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> rest,
                           ffi::Result<ffi::AnyBuffer> low, ffi::Result<ffi::AnyBuffer> counters,
                           ffi::Result<ffi::AnyBuffer> items, ffi::Result<ffi::AnyBuffer> united,
                           ffi::Result<ffi::AnyBuffer> united_rows, bool query_heads_first,
                           bool key_heads_first, bool lse_heads_first, int64_t block_q, int64_t block_kv,
                           int64_t skip_rows, int64_t heads_together, float softcap) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, -1, -1}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  for (const auto& [name, array] : {std::pair{"key", key}, {"value", value}}) {
    check.array(name, array, {-1, -1, -1, -1}, {dtype});
  }
  if (!check.ok()) return check.error();
  const Heads queries = Heads::of(query, query_heads_first), keys = Heads::of(key, key_heads_first);
  Heads values = keys, outs = queries;
  outs.dim = values.dim = value.dimensions()[3];
  const Heads lses = {queries.batch, queries.tokens, queries.heads, 0, lse_heads_first};
  check.array("key", key, {-1, -1, -1, queries.dim}, {dtype});
  check.array("value", value, values.shape(), {dtype});
  const ForwardCall call = {query, key, value,    q_bounds, k_bounds, window, scale,  sinks, out, lse,
                            rest,  low, counters, items,    queries,  keys,   values, outs,  lses};
  call.check(check);
  const bool is_layout = row_pointers.element_count() > 0;
  check.array("q_bounds", q_bounds, {is_layout ? -1 : 0}, {DataType::S32});
  if (!check.ok()) return check.error();
  check.array("k_bounds", k_bounds, {q_bounds.dimensions()[0]}, {DataType::S32});
  const int64_t seqs = is_layout ? q_bounds.dimensions()[0] - 1 : queries.batch;
  check.between("q_bounds", " sequences", 1, is_layout ? attention::kMostPreparedSeqs : kMostTokens, seqs);
  check.require(!is_layout || queries.batch == 1, "query", "a batch of 1 beside lengths end to end",
                std::to_string(queries.batch));
  check.require(keys.batch == queries.batch, "key", "a batch of " + std::to_string(queries.batch),
                std::to_string(keys.batch));
  check.require(keys.heads > 0 && queries.heads > 0 && queries.heads % keys.heads == 0, "query",
                "a multiple of " + std::to_string(keys.heads) + " heads", std::to_string(queries.heads));
  check.between("query", " tokens", 1, kMostTokens, queries.tokens);
  check.between("key", " tokens", 1, kMostTokens, keys.tokens);
  for (const auto& [name, dim] : {std::pair{"query", queries.dim}, {"value", values.dim}}) {
    check.require(dim > 0 && dim % 8 == 0 && dim <= 256, name, "heads of at most 256 elements, in eights",
                  std::to_string(dim));
  }
  check.require(heads_together > 0 && queries.heads % heads_together == 0, "heads_together",
                "a divisor of " + std::to_string(queries.heads), std::to_string(heads_together));
  attention::KeyLists lists = lists_of(check, queries, blocks, ends, first_bits, bits, row_pointers, *united,
                                       *united_rows, block_q, block_kv);
  if (!check.ok()) return check.error();
  const int64_t most_items = items->dimensions()[0];
  const int64_t tiles = is_layout ? queries.tokens / kListedQueries + 2 * (seqs + 2)
                                  : queries.batch * ((queries.tokens - 1) / kListedQueries + 1);
  check.between("items", " work items", tiles * lists.heads, kMaxInt / 2 / queries.heads * lists.heads,
                most_items);
  if (!check.ok()) return check.error();

  ForwardParams params = call.filled(seqs);
  // Heads have lists of their own.
  params.num_kv_heads = params.num_heads;
  params.group = 1;
  params.ends_aligned = is_layout;
  params.sinks_without_keys = true;
  params.skip_rows = static_cast<int>(skip_rows);
  params.softcap = softcap;
  params.base2_lse = true;
  params.lists = lists;
  params.lists.heads_together = static_cast<int>(heads_together);
  params.lists.share = static_cast<int>(queries.heads / keys.heads);
  return launched(kName, device, stream, attention::sm90::launch_forward, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_attention_lists_sm90, pallas_attn::attention_lists,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // q_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // k_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // blocks
                                  .Arg<xla::ffi::AnyBuffer>()  // ends
                                  .Arg<xla::ffi::AnyBuffer>()  // first_bits
                                  .Arg<xla::ffi::AnyBuffer>()  // bits
                                  .Arg<xla::ffi::AnyBuffer>()  // row_pointers
                                  .Arg<xla::ffi::AnyBuffer>()  // window
                                  .Arg<xla::ffi::AnyBuffer>()  // scale
                                  .Arg<xla::ffi::AnyBuffer>()  // sinks
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()  // rest
                                  .Ret<xla::ffi::AnyBuffer>()  // low
                                  .Ret<xla::ffi::AnyBuffer>()  // counters
                                  .Ret<xla::ffi::AnyBuffer>()  // items
                                  .Ret<xla::ffi::AnyBuffer>()  // united
                                  .Ret<xla::ffi::AnyBuffer>()  // united_rows
                                  .Attr<bool>("query_heads_first")
                                  .Attr<bool>("key_heads_first")
                                  .Attr<bool>("lse_heads_first")
                                  .Attr<int64_t>("block_q")
                                  .Attr<int64_t>("block_kv")
                                  .Attr<int64_t>("skip_rows")
                                  .Attr<int64_t>("heads_together")
                                  .Attr<float>("softcap"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
