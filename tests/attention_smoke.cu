// Attention's forward kernel on a few small batches, without XLA: what the sanitizers run (make sanitize).
//
// The batches reach each way of feeding keys, tiles that are partial at either end, tokens of no sequence,
// sequences without queries or keys, windows, sinks, split tiles and their merge, what gradients ask for, and
// rows made of bytes. Before them the kernel that finds documents.
// Results are compared with double precision.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "attention/documents/documents.h"
#include "attention/sm90/forward/launch.h"
#include "attention/widen/widen.h"
#include "common/math.h"
#include "smoke.h"

namespace {

using namespace pallas_attn;
using attention::CacheType;

struct Case {
  const char* name;
  std::vector<std::pair<int, int>> lens;  // queries and keys of each sequence
  int heads, kv_heads, dim;
  int page_size = 0;  // 0: keys are in rows
  CacheType cache = CacheType::kElement;
  bool apart = false;  // the newest tokens' keys are in rows beside pages
  bool gradients = false;
  int left = -1;
  bool sinks = false;
  int padding = 0;
  bool widened = false;  // of a cache of bytes: long sequences in a call of their own, over 16-bit rows
};

template <typename Element>
std::vector<Element> numbers(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<Element> made(count);
  for (Element& x : made) x = Element(normal(random));
  return made;
}

// Keys or values as numbers, [key of all sequences, head, dim], and where the kernel finds them.
struct Stored {
  std::vector<float> all;
  const void* pool;
  const void* rows;
};

template <typename Element>
Stored store(const Case& c, const std::vector<int>& tables, int max_pages, int pages, std::mt19937& random) {
  size_t keys = 0, row = 0, queries = 0;
  for (auto [q_len, k_len] : c.lens) keys += k_len, queries += q_len;
  const size_t width = size_t(c.kv_heads) * c.dim;
  Stored stored = {std::vector<float>(keys * width), nullptr, nullptr};
  auto made = numbers<Element>(keys * width, random);
  auto rows = numbers<Element>((queries + c.padding) * width, random);
  const size_t slots = std::max<size_t>(1, size_t(pages) * c.page_size) * width;
  // What nobody may read is NaN.
  std::vector<Element> pool(slots, Element(NAN));
  std::vector<int8_t> ints(slots, 127);
  std::vector<__nv_fp8_e4m3> floats(slots, __nv_fp8_e4m3(NAN));
  size_t first = 0;
  for (size_t seq = 0; seq < c.lens.size(); ++seq) {
    const auto [q_len, k_len] = c.lens[seq];
    for (int key = 0; key < k_len; ++key) {
      const bool in_row = c.apart && key >= k_len - q_len;
      for (size_t i = 0; i < width; ++i) {
        float& number = stored.all[(first + key) * width + i];
        Element& exact = made[(first + key) * width + i];
        number = float(exact);
        if (in_row) number = float(rows[(row + key - (k_len - q_len)) * width + i]);
        if (in_row || c.page_size == 0) continue;
        const size_t page = tables[seq * max_pages + key / c.page_size];
        const size_t at = (page * c.page_size + key % c.page_size) * width + i;
        if (c.cache == CacheType::kInt8) number = ints[at] = static_cast<int8_t>(std::lround(40 * number));
        if (c.cache == CacheType::kE4m3) number = float(floats[at] = __nv_fp8_e4m3(number));
        pool[at] = exact;
      }
    }
    first += k_len, row += q_len;
  }
  if (c.page_size == 0) {
    stored.pool = on_device(made);
  } else if (c.cache == CacheType::kInt8) {
    stored.pool = on_device(ints);
  } else if (c.cache == CacheType::kE4m3) {
    stored.pool = on_device(floats);
  } else {
    stored.pool = on_device(pool);
  }
  if (c.apart) stored.rows = on_device(rows);
  return stored;
}

// Attends for sequences of 64 rows and more, and leaves the others to the call. Returns how many it took.
template <typename Element>
int64_t run_over_rows(attention::ForwardParams& call, int keys, cudaStream_t stream) {
  const size_t elements = size_t(keys) * call.num_kv_heads * call.head_dim;
  attention::WidenParams widen = {};
  widen.call = call, widen.least_rows = 64, widen.room = keys;
  widen.key = unwritten<Element>(elements), widen.value = unwritten<Element>(elements);
  widen.taken = unwritten<int>(call.num_seqs);
  widen.q_bounds = unwritten<int>(call.num_seqs * attention::kDocumentStep);
  widen.k_bounds = unwritten<int>(call.num_seqs * attention::kDocumentStep);
  check(attention::launch_widen(widen, stream));
  attention::ForwardParams rows = call;
  rows.key = widen.key, rows.value = widen.value;
  rows.key_strides = rows.value_strides = {int64_t{keys} * call.head_dim, call.head_dim, int64_t(elements)};
  rows.q_spans = {widen.q_bounds, attention::kDocumentStep};
  rows.k_spans = {widen.k_bounds, attention::kDocumentStep};
  rows.block_tables = nullptr, rows.seq_lens = nullptr;
  rows.kv_len = keys;
  rows.cache = CacheType::kElement;
  check(attention::sm90::launch_forward(rows, stream));
  check(cudaStreamSynchronize(stream), "rows made of bytes");
  call.taken = widen.taken;
  const auto taken = on_host(widen.taken, call.num_seqs);
  return std::count(taken.begin(), taken.end(), 1);
}

// Packed documents, scattered ones, and many: ranks in order of first tokens, and where each one's lie.
bool find_documents() {
  const int batch = 3, q_len = 700, k_len = 300, tokens = q_len + k_len;
  std::vector<int> q_ids, k_ids;
  for (int row = 0; row < batch; ++row) {
    const auto id = [&](int token) { return row == 0 ? token / 90 : row == 1 ? token % 7 : token * 7919; };
    for (int token = 0; token < q_len; ++token) q_ids.push_back(id(token));
    for (int token = 0; token < k_len; ++token) k_ids.push_back(id(token + 50));
  }
  attention::DocumentsParams params = {};
  params.q_ids = on_device(q_ids), params.k_ids = on_device(k_ids);
  params.q_ranks = unwritten<int>(q_ids.size()), params.k_ranks = unwritten<int>(k_ids.size());
  const size_t table_words = size_t(batch) * tokens * attention::kDocumentStep;
  params.q_table = unwritten<int>(table_words), params.k_table = unwritten<int>(table_words);
  params.scratch = unwritten<int>(batch * attention::documents_scratch(tokens));
  params.batch = batch, params.q_len = q_len, params.k_len = k_len;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  check(attention::launch_documents(params, stream));
  check(cudaStreamSynchronize(stream), "documents");

  Verdict verdict = {1.0f};
  std::vector<std::map<int, int>> ranks(batch);
  const auto compare = [&](const std::vector<int>& ids, int length, const int* found, const int* table) {
    const auto got = on_host(found, ids.size()), rows = on_host(table, table_words);
    for (int row = 0; row < batch; ++row) {
      std::map<int, std::pair<int, int>> spans;
      for (int token = 0; token < length; ++token) {
        const size_t at = size_t(row) * length + token;
        const int known = static_cast<int>(ranks[row].size());
        const int rank = ranks[row].insert({ids[at], known}).first->second;
        verdict.expect(got[at] == rank);
        spans.insert({rank, {token, 0}}).first->second.second = token + 1;
      }
      for (const auto& [rank, span] : spans) {
        const size_t at = (size_t(row) * tokens + rank) * attention::kDocumentStep;
        verdict.expect(rows[at] == span.first && rows[at + 1] == span.second);
      }
    }
  };
  compare(q_ids, q_len, params.q_ranks, params.q_table);
  compare(k_ids, k_len, params.k_ranks, params.k_table);
  return verdict.tell("documents");
}

template <typename Element>
bool run(const Case& c, ElementType type, float tolerance) {
  std::mt19937 random(1);
  const int num_seqs = static_cast<int>(c.lens.size());
  std::vector<int> cu_q = {0}, cu_k = {0}, lens;
  int max_pages = 0, pages = 0;
  for (auto [q_len, k_len] : c.lens) {
    cu_q.push_back(cu_q.back() + q_len);
    cu_k.push_back(cu_k.back() + k_len);
    lens.push_back(k_len);
    if (c.page_size > 0) max_pages = std::max(max_pages, ceil_div(k_len, c.page_size));
  }
  pages = max_pages * num_seqs;
  std::vector<int> tables(pages);
  for (int i = 0; i < pages; ++i) tables[i] = i;
  std::shuffle(tables.begin(), tables.end(), random);
  const int tokens = cu_q.back() + c.padding, group = c.heads / c.kv_heads;
  const auto query = numbers<Element>(size_t(tokens) * c.heads * c.dim, random);
  const Stored key = store<Element>(c, tables, max_pages, pages, random);
  const Stored value = store<Element>(c, tables, max_pages, pages, random);
  const std::vector<float> sinks(c.heads, 0.5f);
  // One scale for a head's keys, and one for its values.
  const bool of_bytes = c.cache != CacheType::kElement;
  const float byte_scale = c.cache == CacheType::kInt8 ? 1.0f / 40 : 0.75f;

  attention::ForwardParams params = {};
  params.query = on_device(query);
  params.key = key.pool, params.value = value.pool;
  params.new_key = key.rows, params.new_value = value.rows;
  const auto strides = [&](int64_t rows, int heads) -> attention::Strides {
    return {c.dim, int64_t{heads} * c.dim, rows * heads * c.dim};
  };
  params.query_strides = params.out_strides = strides(tokens, c.heads);
  params.key_strides = params.value_strides =
      strides(c.page_size > 0 ? c.page_size : cu_k.back(), c.kv_heads);
  params.new_key_strides = params.new_value_strides = strides(tokens, c.kv_heads);
  params.lse_strides = {1, c.heads, int64_t{tokens} * c.heads};
  params.q_spans = {on_device(cu_q), 1};
  if (c.page_size > 0) {
    params.block_tables = on_device(tables);
    params.seq_lens = on_device(lens);
  } else {
    params.k_spans = {on_device(cu_k), 1};
  }
  params.window = on_device(std::vector<int>{c.left, 0});
  params.scale = on_device(std::vector<float>{0.09f});
  if (c.sinks) params.sinks = on_device(sinks);
  if (of_bytes) {
    params.key_scale = on_device(std::vector<float>(c.kv_heads, byte_scale));
    params.value_scale = on_device(std::vector<float>(c.kv_heads, byte_scale));
  }
  const size_t rows = size_t(tokens) * c.heads;
  auto* out = unwritten<Element>(rows * c.dim);
  params.out = out;
  params.lse = unwritten<float>(rows);
  if (c.gradients) {
    params.rest = unwritten<float>(rows);
    params.low = unwritten<int8_t>(rows * c.dim);
  }
  const auto [least_rows, most_rows] = attention::sm90::tile_rows(c.dim, c.dim);
  params.max_partials = 528 / c.kv_heads;
  params.max_items = params.max_partials + tokens / (least_rows / group) + num_seqs + 3;
  params.counters = unwritten<attention::Counters>(1);
  params.items = unwritten<attention::WorkItem>(params.max_items);
  params.split_tiles = unwritten<attention::SplitTile>(params.max_partials);
  const size_t partial_rows = size_t(params.max_partials) * c.kv_heads * most_rows;
  params.partial_out = unwritten<float>(partial_rows * c.dim);
  params.partial_lse = unwritten<RowLse>(partial_rows);
  params.batch = 1, params.q_len = tokens, params.kv_len = c.page_size > 0 ? c.page_size : cu_k.back();
  params.num_pages = pages, params.page_size = c.page_size, params.max_pages = max_pages;
  params.num_seqs = params.seqs_per_batch = num_seqs;
  params.num_heads = c.heads, params.num_kv_heads = c.kv_heads, params.group = group;
  params.head_dim = params.value_dim = c.dim;
  params.ends_aligned = true;
  params.keys_in_l2 = 1 << 30;
  params.element = type;
  params.cache = c.cache;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  const int64_t taken = c.widened ? run_over_rows<Element>(params, cu_k.back(), stream) : 0;
  check(attention::sm90::launch_forward(params, stream));
  check(cudaStreamSynchronize(stream), c.name);
  const auto got = on_host(out, rows * c.dim);
  auto lse = on_host(params.lse, rows);
  if (c.gradients) {
    const auto rest = on_host(params.rest, rows);
    for (size_t i = 0; i < rows; ++i) {
      lse[i] = lse[i] == -INFINITY ? rest[i] * kLn2 : lse[i] * 0.09f + rest[i] * kLn2;
    }
  }

  Verdict verdict = {tolerance};
  verdict.expect((taken > 0) == c.widened && taken < num_seqs);
  for (int token = 0; token < tokens; ++token) {
    const int seq = static_cast<int>(std::upper_bound(cu_q.begin(), cu_q.end(), token) - cu_q.begin()) - 1;
    const bool padding = seq >= num_seqs;
    const int k_len = padding ? 0 : c.lens[seq].second;
    const int place = padding ? -1 : k_len - c.lens[seq].first + token - cu_q[seq];
    for (int head = 0; head < c.heads; ++head) {
      const size_t at = size_t(token) * c.heads + head;
      double sum = c.sinks && !padding && k_len > 0 ? std::exp(0.5) : 0;
      std::vector<double> sums(c.dim);
      for (int k = c.left < 0 ? 0 : std::max(0, place - c.left); k <= place; ++k) {
        const size_t first = (size_t(cu_k[seq] + k) * c.kv_heads + head / group) * c.dim;
        const bool in_row = c.apart && k >= k_len - c.lens[seq].first;
        const double scale = of_bytes && !in_row ? byte_scale : 1;
        double logit = 0;
        for (int d = 0; d < c.dim; ++d) logit += double(float(query[at * c.dim + d])) * key.all[first + d];
        const double weight = std::exp(logit * scale * 0.09f);
        sum += weight;
        for (int d = 0; d < c.dim; ++d) sums[d] += weight * scale * value.all[first + d];
      }
      if (sum == 0) {
        verdict.expect(lse[at] == -INFINITY);
      } else {
        verdict.add(std::abs(lse[at] - std::log(sum)));
      }
      for (int d = 0; d < c.dim; ++d) {
        verdict.add(std::abs(float(got[at * c.dim + d]) - (sum == 0 ? 0 : sums[d] / sum)));
      }
    }
  }
  return verdict.tell(c.name);
}

}  // namespace

int main() {
  const std::vector<std::pair<int, int>> mixed = {{130, 300}, {1, 200}, {0, 0}, {5, 3}, {128, 128}, {1, 0}};
  const std::vector<Case> cases = {
      {"rows", mixed, 4, 2, 64, 0, CacheType::kElement, false, false, -1, true, 70},
      {"gradients", mixed, 4, 1, 128, 0, CacheType::kElement, false, true},
      {"pages", mixed, 4, 2, 128, 16, CacheType::kElement, false, false, 40},
      {"wide heads", mixed, 3, 1, 256, 32},
      {"short pages", mixed, 4, 2, 128, 5},
      {"e4m3", mixed, 4, 2, 128, 16, CacheType::kE4m3},
      {"int8", mixed, 4, 2, 64, 3, CacheType::kInt8},
      {"new tokens", {{100, 300}, {20, 20}}, 4, 2, 64, 16, CacheType::kElement, true},
      {"new tokens beside bytes", {{100, 300}, {20, 20}}, 2, 1, 128, 16, CacheType::kE4m3, true},
      {"split", {{20, 2000}}, 2, 1, 64, 16},
      {"rows of e4m3", mixed, 4, 2, 128, 16, CacheType::kE4m3, false, false, 40, true, 70, true},
      {"rows of int8", mixed, 4, 1, 64, 3, CacheType::kInt8, false, false, -1, false, 0, true},
  };
  bool right = find_documents();
  for (const Case& c : cases) {
    right &= run<__nv_bfloat16>(c, ElementType::kBfloat16, 2e-2f);
    right &= run<__half>(c, ElementType::kFloat16, 4e-3f);
  }
  return right ? 0 : 1;
}
