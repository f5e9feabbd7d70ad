// Attention's backward kernels on a few small batches, without XLA: what the sanitizers run (make sanitize).
//
// The batches reach one pass and three, sums in one order and in any, a KV head's heads, windows, soft caps,
// ALiBi, tiles that are partial, queries and keys that meet nothing, documents side by side and mixed, and a
// layout. Results are compared with double precision.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "attention/sm90/backward/launch.h"
#include "common/math.h"
#include "smoke.h"

namespace {

using namespace pallas_attn;
using namespace pallas_attn::attention;

struct Case {
  const char* name;
  int q_len, kv_len, heads, kv_heads, dim, value_dim;
  int left = -1, right = -1, offset = 0;
  float softcap = 0;
  bool ordered = true;
  bool documents = false;  // two; mixed: their tokens by turns
  bool mixed = false;
  bool layout = false;  // blocks of 128, of which odd rows leave out the first; causal
  float alibi = 0;      // the first head's slope; the next one's is half of it
};

// A compressed sparse row matrix.
struct Listed {
  std::vector<int> pointers = {0}, blocks;

  template <typename Lists>
  Listed(int rows, int columns, Lists lists) {
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        if (lists(row, column)) blocks.push_back(column);
      }
      pointers.push_back(static_cast<int>(blocks.size()));
    }
  }
  SparseRows on() const {
    const int rows = static_cast<int>(pointers.size()) - 1;
    return {on_device(pointers), on_device(blocks), 1, rows, static_cast<int>(blocks.size())};
  }
};
bool lists(int row, int column) { return column <= row && (column > 0 || row % 2 == 0); }

// Tokens [token, head, dim], as elements and as numbers.
template <typename Element>
struct Rows {
  Rows(int tokens, int heads, int dim, std::mt19937& random) : heads(heads), dim(dim) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < tokens * heads * dim; ++i) elements.push_back(Element(normal(random)));
    device = on_device(elements);
  }
  double at(int token, int head, int d) const {
    return float(elements[(size_t(token) * heads + head) * dim + d]);
  }
  Strides strides() const { return {dim, int64_t{heads} * dim, static_cast<int64_t>(elements.size())}; }

  int heads, dim;
  std::vector<Element> elements;
  Element* device;
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

template <typename Element>
bool run(const Case& c, ElementType type, float limit) {
  std::mt19937 random(1);
  const Rows<Element> query(c.q_len, c.heads, c.dim, random), key(c.kv_len, c.kv_heads, c.dim, random),
      value(c.kv_len, c.kv_heads, c.value_dim, random), d_out(c.q_len, c.heads, c.value_dim, random);
  const auto document = [&](int token, int tokens) { return c.mixed ? token % 2 : token >= tokens / 3; };
  const auto sees = [&](int q, int k) {
    const int place = q + c.offset;
    if (c.layout) return k <= place && lists(place / 128, k / 128);
    if (c.documents && document(q, c.q_len) != document(k, c.kv_len)) return false;
    return (c.left < 0 || k >= place - c.left) && (c.right < 0 || k <= place + c.right);
  };

  // In double precision: a row's numbers, and gradients.
  const int group = c.heads / c.kv_heads;
  const float scale = 0.09f;
  std::vector<float> maximum, rest, delta;
  std::vector<double> d_query(query.elements.size()), d_key(key.elements.size()),
      d_value(value.elements.size());
  for (int head = 0; head < c.heads; ++head) {
    const int kv_head = head / group;
    for (int q = 0; q < c.q_len; ++q) {
      std::vector<double> logits(c.kv_len), weights(c.kv_len), d_weights(c.kv_len), slopes(c.kv_len, 1.0);
      double most = -INFINITY, sum = 0;
      const double factor = c.alibi > 0 ? 1 : c.softcap > 0 ? c.softcap : scale;
      for (int k = 0; k < c.kv_len; ++k) {
        if (!sees(q, k)) continue;
        for (int d = 0; d < c.dim; ++d) logits[k] += query.at(q, head, d) * key.at(k, kv_head, d);
        if (c.softcap > 0) {
          logits[k] = std::tanh(logits[k] * scale / c.softcap);
          slopes[k] = 1 - logits[k] * logits[k];
        }
        if (c.alibi > 0) logits[k] = logits[k] * scale + c.alibi / (1 << head) * (k - q - c.offset);
        for (int d = 0; d < c.value_dim; ++d) d_weights[k] += d_out.at(q, head, d) * value.at(k, kv_head, d);
        most = std::max(most, logits[k]);
      }
      const bool some = most > -INFINITY;
      for (int k = 0; some && k < c.kv_len; ++k) {
        weights[k] = sees(q, k) ? std::exp((logits[k] - most) * factor) : 0;
        sum += weights[k];
      }
      for (double& weight : weights) weight /= some ? sum : 1;
      const double mean = dot(weights, d_weights);
      maximum.push_back(some ? most : 0);
      rest.push_back(some ? std::log2(sum) : 0);
      delta.push_back(mean);
      for (int k = 0; k < c.kv_len; ++k) {
        const double d_score = weights[k] * (d_weights[k] - mean) * slopes[k] * scale;
        const size_t at_q = (size_t(q) * c.heads + head) * c.dim, at_k = (size_t(k) * c.kv_heads + kv_head);
        for (int d = 0; d < c.dim; ++d) {
          d_query[at_q + d] += d_score * key.at(k, kv_head, d);
          d_key[at_k * c.dim + d] += d_score * query.at(q, head, d);
        }
        for (int d = 0; d < c.value_dim; ++d) {
          d_value[at_k * c.value_dim + d] += weights[k] * d_out.at(q, head, d);
        }
      }
    }
  }

  // Documents' first token, one past the last, whether all in between are theirs; and tokens' ranks.
  const auto table = [&](int tokens) {
    if (c.mixed) return std::vector<int>{0, tokens - (tokens + 1) % 2, 0, 1, tokens - tokens % 2, 0};
    return std::vector<int>{0, tokens / 3, 1, tokens / 3, tokens, 1};
  };
  const auto ranks = [&](int tokens) {
    std::vector<int> ranks;
    for (int i = 0; i < tokens; ++i) ranks.push_back(document(i, tokens));
    return ranks;
  };
  BackwardParams params = {};
  params.query = query.device, params.key = key.device;
  params.value = value.device, params.d_out = d_out.device;
  params.query_strides = query.strides(), params.key_strides = key.strides();
  params.value_strides = value.strides(), params.out_strides = d_out.strides();
  params.seqs_per_batch = 1;
  if (c.documents) {
    params.q_spans = {on_device(table(c.q_len)), kDocumentStep};
    params.k_spans = {on_device(table(c.kv_len)), kDocumentStep};
    params.q_ranks = on_device(ranks(c.q_len)), params.k_ranks = on_device(ranks(c.kv_len));
    params.seqs_per_batch = 2;
  }
  if (c.layout) {
    const int blocks = ceil_div(c.kv_len, 128);
    params.rows_of_queries = Listed(blocks, blocks, lists).on();
    params.rows_of_keys = Listed(blocks, blocks, [](int key, int query) { return lists(query, key); }).on();
    params.q_shift = params.k_shift = 7;
    params.q_spans = {on_device(std::vector<int>{0, c.q_len, 1}), kDocumentStep};
    params.k_spans = {on_device(std::vector<int>{0, c.kv_len, 1}), kDocumentStep};
  }
  params.maximum = on_device(maximum), params.rest = on_device(rest), params.delta = on_device(delta);
  params.total = on_device(std::vector<float>(delta.size(), 0.0f));
  std::vector<float> alibi;
  for (int head = 0; head < c.heads; ++head) alibi.push_back(c.alibi / (1 << head));
  if (c.alibi > 0) params.alibi = on_device(alibi);
  auto* const to_query = unwritten<Element>(d_query.size());
  auto* const to_key = unwritten<Element>(d_key.size());
  auto* const to_value = unwritten<Element>(d_value.size());
  params.d_query = to_query, params.d_key = to_key, params.d_value = to_value;
  const auto needs = sm90::backward::needs_of(c.dim, c.value_dim, c.layout);
  params.counters = unwritten<BackwardCounters>(kMostPasses);
  params.key_tiles = unwritten<ListedTile>(c.kv_len);
  params.query_tiles = unwritten<ListedTile>(c.q_len);
  params.turns = unwritten<int>(delta.size());
  params.sums = filled_with_nan<float>(delta.size() * std::max(needs.sum_columns, 1));
  params.batch = 1, params.q_len = c.q_len, params.kv_len = c.kv_len;
  params.num_heads = c.heads, params.num_kv_heads = c.kv_heads, params.group = group;
  params.head_dim = c.dim, params.value_dim = c.value_dim;
  params.left = c.left, params.right = c.right, params.offset = c.offset;
  params.heads_together = c.kv_heads;
  params.ordered = c.ordered;
  params.scale = scale, params.softcap = c.softcap;
  params.element = type;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  check(sm90::backward::launch_backward(params, stream));
  check(cudaStreamSynchronize(stream), "running");

  Verdict verdict = {limit};
  const auto compare = [&](const Element* found, const std::vector<double>& exact) {
    const auto got = on_host(found, exact.size());
    double apart = 0, size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      apart += (float(got[i]) - exact[i]) * (float(got[i]) - exact[i]), size += exact[i] * exact[i];
    }
    verdict.add(std::sqrt(apart / size));
  };
  compare(to_query, d_query);
  compare(to_key, d_key);
  compare(to_value, d_value);
  return verdict.tell(c.name);
}

}  // namespace

int main() {
  const std::vector<Case> cases = {
      {"causal", 200, 300, 4, 2, 128, 128, -1, 0, 100},
      {"narrow", 130, 260, 2, 2, 64, 64},
      {"window", 200, 140, 2, 1, 96, 80, 5, 9, -40},
      {"any order", 260, 300, 2, 1, 64, 64, -1, 0, 40, 0, false},
      {"soft cap", 130, 130, 1, 1, 128, 128, -1, 0, 0, 1.5f},
      {"ALiBi", 200, 300, 4, 2, 128, 128, -1, 0, 100, 0, true, false, false, false, 0.5f},
      {"narrow ALiBi", 130, 260, 2, 1, 64, 64, -1, 0, 130, 0, true, false, false, false, 0.5f},
      {"documents", 200, 200, 2, 1, 64, 64, -1, 0, 0, 0, true, true},
      {"mixed documents", 200, 200, 2, 1, 64, 64, -1, -1, 0, 0, true, true, true},
      {"wide", 200, 300, 2, 1, 256, 256, -1, 0, 100},
      {"wide keys", 200, 140, 2, 2, 192, 128, 5, 9, -40},
      {"wide documents", 200, 200, 1, 1, 256, 256, -1, 0, 0, 0, true, true},
      {"layout", 230, 300, 2, 1, 64, 64, -1, 0, 70, 0, true, false, false, true},
      {"wide layout", 200, 200, 2, 2, 128, 128, -1, 0, 0, 0, true, false, false, true},
  };
  bool right = true;
  for (const Case& c : cases) {
    right &= run<__nv_bfloat16>(c, ElementType::kBfloat16, 8e-3f);
    right &= run<__half>(c, ElementType::kFloat16, 1e-3f);
  }
  return right ? 0 : 1;
}
