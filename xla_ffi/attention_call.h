// What both handlers of attention's forward pass are given, whatever says which keys a query sees.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "attention_heads.h"
#include "checks.h"
#include "xla/ffi/api/ffi.h"

namespace pallas_attn {

struct ForwardCall {
  xla::ffi::AnyBuffer query, key, value, q_bounds, k_bounds, window, scale, sinks;
  xla::ffi::Result<xla::ffi::AnyBuffer> out, lse, rest, low, counters, items;
  Heads queries, keys, values, outs, lses;

  // What does not hang on where keys are stored, nor as what.
  void check(ArgumentChecker& check) const {
    using xla::ffi::DataType;
    const std::vector<int64_t> none = {0};
    check.array("out", *out, outs.shape(), {query.element_type()});
    check.array("lse", *lse, lses.shape(), {DataType::F32});
    check.array("rest", *rest, rest->element_count() == 0 ? none : lses.shape(), {DataType::F32});
    check.array("low", *low, low->element_count() == 0 ? none : outs.shape(), {DataType::S8});
    check.array("window", window, {2}, {DataType::S32});
    check.array("scale", scale, {1}, {DataType::F32});
    check.array("sinks", sinks, {sinks.element_count() == 0 ? 0 : queries.heads}, {DataType::F32});
    check.array("counters", *counters, {4}, {DataType::S32});
    check.array("items", *items, {-1, 8}, {DataType::S32});
  }

  // Of `seqs` sequences in all batches. The handler fills in what is its own.
  attention::ForwardParams filled(int64_t seqs) const {
    attention::ForwardParams params = {};
    params.query = query.untyped_data();
    params.key = key.untyped_data();
    params.value = value.untyped_data();
    params.query_strides = queries.strides();
    params.key_strides = keys.strides();
    params.value_strides = values.strides();
    params.out_strides = outs.strides();
    params.lse_strides = lses.strides();
    params.q_spans = {optional<int>(q_bounds), 1};
    params.k_spans = {optional<int>(k_bounds), 1};
    params.window = optional<int>(window);
    params.scale = optional<float>(scale);
    params.sinks = optional<float>(sinks);
    params.out = out->untyped_data();
    params.lse = lse->typed_data<float>();
    params.rest = rest->element_count() > 0 ? rest->typed_data<float>() : nullptr;
    params.low = low->element_count() > 0 ? low->untyped_data() : nullptr;
    params.counters = static_cast<attention::Counters*>(counters->untyped_data());
    params.items = static_cast<attention::WorkItem*>(items->untyped_data());
    params.max_items = static_cast<int>(items->dimensions()[0]);
    params.batch = static_cast<int>(queries.batch);
    params.q_len = static_cast<int>(queries.tokens);
    params.kv_len = static_cast<int>(keys.tokens);
    params.num_seqs = static_cast<int>(seqs);
    params.seqs_per_batch = static_cast<int>(seqs / queries.batch);
    params.num_heads = static_cast<int>(queries.heads);
    params.num_kv_heads = static_cast<int>(keys.heads);
    params.group = static_cast<int>(queries.heads / keys.heads);
    params.head_dim = static_cast<int>(queries.dim);
    params.value_dim = static_cast<int>(values.dim);
    params.element =
        query.element_type() == xla::ffi::DataType::BF16 ? ElementType::kBfloat16 : ElementType::kFloat16;
    return params;
  }
};

}  // namespace pallas_attn
