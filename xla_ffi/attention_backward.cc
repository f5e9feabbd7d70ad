// FFI handler of attention's backward pass for sm_90: unpack, check, fill the parameters, launch.
#include <cuda_runtime.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "attention/backward_params.h"
#include "attention/sm90/backward/launch.h"
#include "attention_heads.h"
#include "checks.h"
#include "common/math.h"
#include "device_guard.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {
namespace {

namespace ffi = xla::ffi;
using attention::BackwardParams;
using ffi::DataType;

constexpr char kName[] = "pallas_attn_attention_backward_sm90";
constexpr int64_t kLeastBlock = 128, kMostBlock = int64_t{1} << 30;

// Of a side of `own` tokens in blocks of `block`, which meet blocks of the other side.
attention::BlockLists lists_of(ArgumentChecker& check, const char* name, const Heads& queries, int64_t own,
                               int64_t block, ffi::AnyBuffer blocks, ffi::AnyBuffer counts) {
  attention::BlockLists lists = {};
  check.array(name, blocks, {-1, -1, -1, -1, 2}, {DataType::S32});
  if (!check.ok()) return lists;
  const auto sizes = blocks.dimensions();
  check.array(name, counts, {sizes[0], sizes[1], sizes[2]}, {DataType::S32});
  check.require(sizes[0] == 1 || sizes[0] == queries.batch, name,
                "a batch of 1 or " + std::to_string(queries.batch), std::to_string(sizes[0]));
  check.require(sizes[1] == 1 || sizes[1] == queries.heads, name,
                "1 head or " + std::to_string(queries.heads), std::to_string(sizes[1]));
  check.between(name, " rows", (own - 1) / block + 1, kMaxInt / block, sizes[2]);
  check.between(name, " entries", 1, kMaxInt, sizes[3]);
  lists.blocks = static_cast<const attention::ListedBlock*>(blocks.untyped_data());
  lists.counts = counts.typed_data<int32_t>();
  lists.batch = static_cast<int>(sizes[0]), lists.heads = static_cast<int>(sizes[1]);
  lists.rows = static_cast<int>(sizes[2]), lists.pitch = static_cast<int>(sizes[3]);
  return lists;
}

// A layout's rows, of a side in blocks of `block`.
attention::SparseRows rows_of(ArgumentChecker& check, const char* name, const Heads& queries, int64_t block,
                              ffi::AnyBuffer pointers, ffi::AnyBuffer blocks) {
  attention::SparseRows rows = {};
  check.array(name, pointers, {-1, -1}, {DataType::S32});
  if (!check.ok()) return rows;
  const auto sizes = pointers.dimensions();
  check.array(name, blocks, {sizes[0], -1}, {DataType::S32});
  if (!check.ok()) return rows;
  check.require(sizes[0] == 1 || sizes[0] == queries.heads, name,
                "1 head or " + std::to_string(queries.heads), std::to_string(sizes[0]));
  check.between(name, " rows", 1, kMaxInt / block, sizes[1] - 1);
  check.between(name, " entries", 1, kMaxInt, blocks.dimensions()[1]);
  rows.pointers = pointers.typed_data<int32_t>();
  rows.blocks = blocks.typed_data<int32_t>();
  rows.heads = static_cast<int>(sizes[0]), rows.rows = static_cast<int>(sizes[1]) - 1;
  rows.pitch = static_cast<int>(blocks.dimensions()[1]);
  return rows;
}

ffi::Error attention_backward(
    cudaStream_t stream, int32_t device, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
    ffi::AnyBuffer d_out, ffi::AnyBuffer maximum, ffi::AnyBuffer rest, ffi::AnyBuffer delta,
    ffi::AnyBuffer total, ffi::AnyBuffer alibi, ffi::AnyBuffer q_bounds, ffi::AnyBuffer k_bounds,
    ffi::AnyBuffer q_ranks, ffi::AnyBuffer k_ranks, ffi::AnyBuffer num_seqs, ffi::AnyBuffer key_blocks,
    ffi::AnyBuffer key_counts, ffi::AnyBuffer query_blocks, ffi::AnyBuffer query_counts, ffi::AnyBuffer bits,
    ffi::AnyBuffer key_pointers, ffi::AnyBuffer blocks_of_keys, ffi::AnyBuffer query_pointers,
    ffi::AnyBuffer blocks_of_queries, ffi::Result<ffi::AnyBuffer> d_query, ffi::Result<ffi::AnyBuffer> d_key,
    ffi::Result<ffi::AnyBuffer> d_value, ffi::Result<ffi::AnyBuffer> counters,
    ffi::Result<ffi::AnyBuffer> key_tiles, ffi::Result<ffi::AnyBuffer> query_tiles,
    ffi::Result<ffi::AnyBuffer> turns, ffi::Result<ffi::AnyBuffer> sums, bool heads_first, bool ordered,
    int64_t left, int64_t right, int64_t offset, int64_t heads_together, int64_t block_q, int64_t block_kv,
    float scale, float softcap) {
  ArgumentChecker check(kName);
  check.array("query", query, {-1, -1, -1, -1}, {DataType::BF16, DataType::F16});
  if (!check.ok()) return check.error();
  const DataType dtype = query.element_type();
  check.array("key", key, {-1, -1, -1, -1}, {dtype});
  check.array("value", value, {-1, -1, -1, -1}, {dtype});
  if (!check.ok()) return check.error();
  const Heads queries = Heads::of(query, heads_first), keys = Heads::of(key, heads_first);
  Heads values = keys, outs = queries;
  values.dim = outs.dim = value.dimensions()[3];
  check.array("key", key, {queries.batch, -1, -1, queries.dim}, {dtype});
  check.array("value", value, values.shape(), {dtype});
  check.array("d_out", d_out, outs.shape(), {dtype});
  const std::vector<int64_t> none = {0};
  const std::vector<int64_t> rows = {queries.batch, queries.heads, queries.tokens};
  check.array("maximum", maximum, rows, {DataType::F32});
  check.array("rest", rest, rows, {DataType::F32});
  check.array("delta", delta, rows, {DataType::F32});
  check.array("total", total, rows, {DataType::F32});
  check.array("d_query", *d_query, queries.shape(), {dtype});
  check.array("d_key", *d_key, keys.shape(), {dtype});
  check.array("d_value", *d_value, values.shape(), {dtype});
  check.require(keys.heads > 0 && queries.heads > 0 && queries.heads % keys.heads == 0, "query",
                "a multiple of " + std::to_string(keys.heads) + " heads", std::to_string(queries.heads));
  check.between("query", " tokens", 1, kMostTokens, queries.tokens);
  check.between("key", " tokens", 1, kMostTokens, keys.tokens);
  check.between("left", "", -1, kMostTokens, left);
  check.between("right", "", -1, kMostTokens, right);
  check.between("offset", "", -kMostTokens, kMostTokens, offset);
  for (const auto& [name, dim] : {std::pair{"query", queries.dim}, {"value", values.dim}}) {
    check.require(dim > 0 && dim % 8 == 0, name, "heads of a multiple of 8 elements", std::to_string(dim));
  }
  if (!check.ok()) return check.error();
  const bool listed = bits.element_count() > 0, of_layout = key_pointers.element_count() > 0;
  const auto needs = attention::sm90::backward::needs_of(static_cast<int>(queries.dim),
                                                         static_cast<int>(values.dim), listed || of_layout);
  check.require(needs.passes > 0, "query", "heads of a size there is a kernel for",
                std::to_string(queries.dim));
  if (!check.ok()) return check.error();
  const bool documents = q_bounds.element_count() > 0;
  check.array("q_bounds", q_bounds, documents ? std::vector<int64_t>{queries.batch, -1, 3} : none,
              {DataType::S32});
  if (!check.ok()) return check.error();
  const int64_t seqs = documents ? q_bounds.dimensions()[1] : 1;
  check.array("k_bounds", k_bounds, documents ? std::vector<int64_t>{queries.batch, seqs, 3} : none,
              {DataType::S32});
  const bool ranked = documents && !of_layout;
  check.array("q_ranks", q_ranks, ranked ? std::vector<int64_t>{queries.batch, queries.tokens} : none,
              {DataType::S32});
  check.array("k_ranks", k_ranks, ranked ? std::vector<int64_t>{queries.batch, keys.tokens} : none,
              {DataType::S32});
  check.array("num_seqs", num_seqs, {num_seqs.element_count() == 0 ? 0 : 1}, {DataType::S32});
  // Where there are documents, a tile may have a single token of its own.
  const auto tiles = [&](int64_t tokens) {
    return queries.batch * (documents ? tokens : (tokens + needs.held - 1) / needs.held);
  };
  const bool adds = needs.sum_columns > 0;
  const bool tilted = alibi.element_count() > 0;
  check.array("alibi", alibi, {tilted ? queries.heads : 0}, {DataType::F32});
  check.require(!tilted || (adds && softcap == 0.0f), "alibi", "none but in one pass without a soft cap",
                "some");
  check.array("counters", *counters, {attention::kMostPasses, 2}, {DataType::S32});
  check.array("key_tiles", *key_tiles, {tiles(keys.tokens), 4}, {DataType::S32});
  check.array("query_tiles", *query_tiles, {adds ? 0 : tiles(queries.tokens), 4}, {DataType::S32});
  check.array("turns", *turns, {queries.batch, adds ? queries.tokens : 0, queries.heads}, {DataType::S32});
  check.array("sums", *sums, {queries.batch, queries.heads, queries.tokens, needs.sum_columns},
              {DataType::F32});
  if (!check.ok()) return check.error();
  attention::BlockLists of_keys = {}, of_queries = {};
  attention::SparseRows rows_of_keys = {}, rows_of_queries = {};
  const auto check_empty = [&](std::initializer_list<std::pair<const char*, ffi::AnyBuffer>> arrays) {
    for (const auto& [name, array] : arrays) check.array(name, array, none, {DataType::S32});
  };
  if (listed || of_layout) {
    for (const auto& [name, size] : {std::pair{"block_q", block_q}, {"block_kv", block_kv}}) {
      check.between(name, "", kLeastBlock, kMostBlock, size);
      check.require((size & (size - 1)) == 0, name, "a power of two", std::to_string(size));
    }
    if (!check.ok()) return check.error();
  }
  if (of_layout) {
    check.require(documents && !listed && left < 0 && right == 0 && offset == 0, "key_pointers",
                  "documents, no bits, and what is causal", "others");
    rows_of_keys = rows_of(check, "key_pointers", queries, block_kv, key_pointers, blocks_of_keys);
    rows_of_queries = rows_of(check, "query_pointers", queries, block_q, query_pointers, blocks_of_queries);
  } else {
    check_empty({{"key_pointers", key_pointers},
                 {"blocks_of_keys", blocks_of_keys},
                 {"query_pointers", query_pointers},
                 {"blocks_of_queries", blocks_of_queries}});
  }
  if (!check.ok()) return check.error();
  if (listed) {
    check.require(!documents && left < 0 && right < 0, "bits", "neither documents nor bounds beside them",
                  "some");
    of_keys = lists_of(check, "key_blocks", queries, keys.tokens, block_kv, key_blocks, key_counts);
    of_queries =
        lists_of(check, "query_blocks", queries, queries.tokens, block_q, query_blocks, query_counts);
    check.array("bits", bits, {-1, block_q / 64, block_kv / 64, 128}, {DataType::S32});
    if (!check.ok()) return check.error();
    check.between("bits", " words of a thread", 1, kMaxInt, static_cast<int64_t>(bits.element_count()) / 128);
  } else {
    check_empty({{"key_blocks", key_blocks},
                 {"key_counts", key_counts},
                 {"query_blocks", query_blocks},
                 {"query_counts", query_counts}});
  }
  check.between("key", " tiles of all heads", 1, kMaxInt / 2, tiles(keys.tokens) * keys.heads);
  check.between("query", " tiles of all heads", 1, kMaxInt / 2, tiles(queries.tokens) * queries.heads);
  check.between("heads_together", "", 1, keys.heads, heads_together);
  check.between("q_bounds", " documents", 1, kMaxInt / 4 / queries.batch, seqs);
  if (!check.ok()) return check.error();

  BackwardParams params = {};
  params.query = query.untyped_data();
  params.key = key.untyped_data();
  params.value = value.untyped_data();
  params.d_out = d_out.untyped_data();
  params.query_strides = queries.strides();
  params.key_strides = keys.strides();
  params.value_strides = values.strides();
  params.out_strides = outs.strides();
  params.maximum = maximum.typed_data<float>();
  params.rest = rest.typed_data<float>();
  params.delta = delta.typed_data<float>();
  params.total = total.typed_data<float>();
  params.alibi = optional<float>(alibi);
  params.d_query = d_query->untyped_data();
  params.d_key = d_key->untyped_data();
  params.d_value = d_value->untyped_data();
  params.q_spans = {optional<int>(q_bounds), attention::kDocumentStep};
  params.k_spans = {optional<int>(k_bounds), attention::kDocumentStep};
  params.q_ranks = optional<int>(q_ranks);
  params.k_ranks = optional<int>(k_ranks);
  params.num_seqs_now = optional<int>(num_seqs);
  params.of_keys = of_keys, params.of_queries = of_queries;
  params.rows_of_keys = rows_of_keys, params.rows_of_queries = rows_of_queries;
  if (listed) {
    params.bits = static_cast<const uint32_t*>(bits.untyped_data());
    params.max_bits = static_cast<int>(bits.dimensions()[0]);
  }
  if (listed || of_layout) {
    params.q_shift = highest_bit(static_cast<uint32_t>(block_q));
    params.k_shift = highest_bit(static_cast<uint32_t>(block_kv));
  }
  params.counters = static_cast<attention::BackwardCounters*>(counters->untyped_data());
  params.key_tiles = static_cast<attention::ListedTile*>(key_tiles->untyped_data());
  params.query_tiles = static_cast<attention::ListedTile*>(query_tiles->untyped_data());
  params.turns = turns->typed_data<int>();
  params.sums = sums->typed_data<float>();
  params.seqs_per_batch = static_cast<int>(seqs);
  params.batch = static_cast<int>(queries.batch);
  params.q_len = static_cast<int>(queries.tokens);
  params.kv_len = static_cast<int>(keys.tokens);
  params.num_heads = static_cast<int>(queries.heads);
  params.num_kv_heads = static_cast<int>(keys.heads);
  params.group = params.num_heads / params.num_kv_heads;
  params.head_dim = static_cast<int>(queries.dim);
  params.value_dim = static_cast<int>(values.dim);
  params.left = static_cast<int>(left);
  params.right = static_cast<int>(right);
  params.offset = static_cast<int>(offset);
  params.heads_together = static_cast<int>(heads_together);
  params.ordered = ordered;
  params.scale = scale;
  params.softcap = softcap;
  params.element = dtype == DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;

  return launched(kName, device, stream, attention::sm90::backward::launch_backward, params);
}

}  // namespace
}  // namespace pallas_attn

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_attn_attention_backward_sm90, pallas_attn::attention_backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Arg<xla::ffi::AnyBuffer>()  // query
                                  .Arg<xla::ffi::AnyBuffer>()  // key
                                  .Arg<xla::ffi::AnyBuffer>()  // value
                                  .Arg<xla::ffi::AnyBuffer>()  // d_out
                                  .Arg<xla::ffi::AnyBuffer>()  // maximum
                                  .Arg<xla::ffi::AnyBuffer>()  // rest
                                  .Arg<xla::ffi::AnyBuffer>()  // delta
                                  .Arg<xla::ffi::AnyBuffer>()  // total
                                  .Arg<xla::ffi::AnyBuffer>()  // alibi
                                  .Arg<xla::ffi::AnyBuffer>()  // q_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // k_bounds
                                  .Arg<xla::ffi::AnyBuffer>()  // q_ranks
                                  .Arg<xla::ffi::AnyBuffer>()  // k_ranks
                                  .Arg<xla::ffi::AnyBuffer>()  // num_seqs
                                  .Arg<xla::ffi::AnyBuffer>()  // key_blocks
                                  .Arg<xla::ffi::AnyBuffer>()  // key_counts
                                  .Arg<xla::ffi::AnyBuffer>()  // query_blocks
                                  .Arg<xla::ffi::AnyBuffer>()  // query_counts
                                  .Arg<xla::ffi::AnyBuffer>()  // bits
                                  .Arg<xla::ffi::AnyBuffer>()  // key_pointers
                                  .Arg<xla::ffi::AnyBuffer>()  // blocks_of_keys
                                  .Arg<xla::ffi::AnyBuffer>()  // query_pointers
                                  .Arg<xla::ffi::AnyBuffer>()  // blocks_of_queries
                                  .Ret<xla::ffi::AnyBuffer>()  // d_query
                                  .Ret<xla::ffi::AnyBuffer>()  // d_key
                                  .Ret<xla::ffi::AnyBuffer>()  // d_value
                                  .Ret<xla::ffi::AnyBuffer>()  // counters
                                  .Ret<xla::ffi::AnyBuffer>()  // key_tiles
                                  .Ret<xla::ffi::AnyBuffer>()  // query_tiles
                                  .Ret<xla::ffi::AnyBuffer>()  // turns
                                  .Ret<xla::ffi::AnyBuffer>()  // sums
                                  .Attr<bool>("heads_first")
                                  .Attr<bool>("ordered")
                                  .Attr<int64_t>("left")
                                  .Attr<int64_t>("right")
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("heads_together")
                                  .Attr<int64_t>("block_q")
                                  .Attr<int64_t>("block_kv")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
