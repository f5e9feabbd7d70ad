// Block-sparse prefill in CUDA on a few small batches, without XLA: what the sanitizers run (make sanitize).
// By the kernel of its own, and by attention's where lists name the keys.
//
// The batches reach all branches: tiles that are partial at either end, tokens of no sequence, sequences of
// one query that are left out, rows of nothing, of more columns than a warp has lanes and of some that cannot
// be right, lengths that cannot be right, blocks of several tiles. Results are compared with double
// precision.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "attention/lists.h"
#include "attention/sm90/forward/launch.h"
#include "blocksparse/sm90/launch.h"
#include "common/math.h"
#include "smoke.h"

namespace {

using namespace pallas_attn;

struct Case {
  const char* name;
  std::vector<std::pair<int, int>> lens;  // queries and keys of each sequence
  int heads, kv_heads;
  int block_shift, q_block_shift;
  double live;
  int padding = 0;
  bool skip_single = false;
  int bad_row = -1;         // of head 0, whose first column lies ahead
  bool bad_length = false;  // of the last sequence
};

constexpr int kDim = 128;

template <typename Element>
std::vector<Element> numbers(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<Element> made(count);
  for (Element& x : made) x = Element(normal(random));
  return made;
}

// The same by attention's kernel. The parts of the log-sum-exp: [num_tokens, num_heads] of each.
std::vector<float2> launch_by_lists(const blocksparse::PrefillParams& from, cudaStream_t stream,
                                    const char* name) {
  attention::ForwardParams params = {};
  params.query = from.query, params.key = from.key, params.value = from.value;
  const auto strides = [](int64_t rows, int heads, int dim) -> attention::Strides {
    return {dim, int64_t{heads} * dim, rows * heads * dim};
  };
  params.query_strides = params.out_strides = strides(from.num_tokens, from.num_heads, kDim);
  params.key_strides = params.value_strides = strides(from.num_key_tokens, from.num_kv_heads, kDim);
  params.lse_strides = strides(from.num_tokens, from.num_heads, 1);
  params.q_spans = {from.cu_q_lens, 1}, params.k_spans = {from.cu_k_lens, 1};
  params.window = on_device(std::vector<int>{-1, 0});
  params.scale = on_device(std::vector<float>{from.scale});
  const size_t rows = size_t(from.num_tokens) * from.num_heads;
  params.out = from.out, params.low = from.low;
  params.lse = filled_with_nan<float>(rows), params.rest = filled_with_nan<float>(rows);
  params.batch = 1, params.q_len = from.num_tokens, params.kv_len = from.num_key_tokens;
  params.num_seqs = params.seqs_per_batch = from.num_seqs;
  params.num_heads = params.num_kv_heads = from.num_heads, params.group = 1;
  params.head_dim = params.value_dim = kDim;
  params.ends_aligned = true;
  params.skip_rows = from.skip_single;
  params.lists.heads_together = from.num_heads / from.num_kv_heads;
  params.max_items =
      (from.num_tokens / attention::kListedQueries + 2 * (from.num_seqs + 2)) * from.layout_heads;
  params.counters = unwritten<attention::Counters>(1);
  params.items = unwritten<attention::WorkItem>(params.max_items);
  params.base2_lse = true;
  params.element = from.element;
  params.lists.blocks = from.columns, params.lists.row_pointers = from.row_pointers;
  params.lists.batch = 1, params.lists.heads = from.layout_heads, params.lists.rows = from.num_rows;
  params.lists.pitch = from.num_columns;
  params.lists.q_shift = from.q_block_shift, params.lists.k_shift = from.block_shift;
  params.lists.share = from.num_heads / from.num_kv_heads;
  check(attention::sm90::launch_forward(params, stream));
  check(cudaStreamSynchronize(stream), name);
  const auto maxima = on_host(params.lse, rows), rests = on_host(params.rest, rows);
  std::vector<float2> parts;
  for (size_t i = 0; i < rows; ++i) {
    // Where all of it is the rest, the maximum is none.
    const bool whole = std::isnan(rests[i]) || rests[i] == -INFINITY;
    parts.push_back(make_float2(whole ? 0.0f : maxima[i], rests[i]));
  }
  return parts;
}

template <typename Element>
bool run(const Case& c, ElementType type, float tolerance, bool by_lists) {
  std::mt19937 random(1);
  std::vector<int> cu_q = {0}, cu_k = {0};
  int longest = 1;
  for (auto [q_len, k_len] : c.lens) {
    cu_q.push_back(cu_q.back() + q_len);
    cu_k.push_back(cu_k.back() + k_len);
    longest = std::max(longest, k_len);
  }
  const int tokens = cu_q.back() + c.padding, keys = std::max(1, cu_k.back());
  const int rows = ((longest - 1) >> c.q_block_shift) + 1;
  std::vector<int> pointers, columns;
  std::vector<std::vector<int>> listed(c.heads * rows);
  for (int head = 0; head < c.heads; ++head) {
    for (int row = 0; row < rows; ++row) {
      const int last = (((row + 1) << c.q_block_shift) - 1) >> c.block_shift;
      for (int column = 0; column <= last; ++column) {
        if (random() % 1000 < c.live * 1000) listed[head * rows + row].push_back(column);
      }
    }
  }
  size_t most = 1;
  for (int head = 0; head < c.heads; ++head) {
    size_t count = 0;
    for (int row = 0; row < rows; ++row) count += listed[head * rows + row].size();
    most = std::max(most, count);
  }
  for (int head = 0; head < c.heads; ++head) {
    pointers.push_back(0);
    columns.resize(head * most, -1);
    for (int row = 0; row < rows; ++row) {
      const auto& own = listed[head * rows + row];
      columns.insert(columns.end(), own.begin(), own.end());
      if (head == 0 && row == c.bad_row && !own.empty()) columns[columns.size() - own.size()] = 1 << 30;
      pointers.push_back(static_cast<int>(columns.size() - head * most));
    }
  }
  columns.resize(c.heads * most, -1);
  if (c.bad_length) cu_k.back() += 1000;

  const auto query = numbers<Element>(size_t(tokens) * c.heads * kDim, random);
  auto key = numbers<Element>(size_t(keys) * c.kv_heads * kDim, random);
  auto value = numbers<Element>(size_t(keys) * c.kv_heads * kDim, random);
  blocksparse::PrefillParams params = {};
  params.query = on_device(query);
  params.key = on_device(key);
  params.value = on_device(value);
  params.cu_q_lens = on_device(cu_q);
  params.cu_k_lens = on_device(cu_k);
  params.row_pointers = on_device(pointers);
  params.columns = on_device(columns);
  // Rows that are left out stay as they are, and are read all the same.
  auto* out = filled_with_nan<Element>(query.size());
  params.out = out;
  params.lse = reinterpret_cast<float2*>(filled_with_nan<float>(size_t(tokens) * c.heads * 2));
  params.low = unwritten<int8_t>(query.size());
  params.taken = unwritten<int>(1);
  params.num_tokens = tokens;
  params.num_key_tokens = keys;
  params.num_seqs = static_cast<int>(c.lens.size());
  params.num_heads = c.heads;
  params.num_kv_heads = c.kv_heads;
  params.layout_heads = c.heads;
  params.num_rows = rows;
  params.num_columns = static_cast<int>(most);
  params.block_shift = c.block_shift;
  params.q_block_shift = c.q_block_shift;
  params.heads_together = c.kv_heads;
  params.skip_single = c.skip_single;
  params.scale = 0.09f;
  params.element = type;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  std::vector<float2> parts;
  if (by_lists) {
    parts = launch_by_lists(params, stream, c.name);
  } else {
    check(blocksparse::sm90::launch_prefill(params, stream));
    check(cudaStreamSynchronize(stream), c.name);
    parts = on_host(params.lse, size_t(tokens) * c.heads);
  }
  const auto got = on_host(out, query.size());
  std::vector<float> got_lse;
  for (const float2& lse : parts) {
    got_lse.push_back(lse.y == -INFINITY ? lse.y : lse.x * params.scale + lse.y * kLn2);
  }

  Verdict verdict = {tolerance};
  for (int token = 0; token < tokens; ++token) {
    const int seq = static_cast<int>(std::upper_bound(cu_q.begin(), cu_q.end(), token) - cu_q.begin()) - 1;
    const bool padding = seq >= params.num_seqs;
    const auto [q_len, k_len] = padding ? std::pair{0, 0} : c.lens[seq];
    if (c.skip_single && q_len == 1) continue;
    const int position = padding ? -1 : k_len - q_len + token - cu_q[seq];
    const bool bad_length = c.bad_length && seq == params.num_seqs - 1;
    for (int head = 0; head < c.heads; ++head) {
      const Element* q = &query[(size_t(token) * c.heads + head) * kDim];
      const size_t at = size_t(token) * c.heads + head;
      const int row = position < 0 ? -1 : position >> c.q_block_shift;
      if (bad_length || (row >= 0 && head == 0 && row == c.bad_row && !listed[row].empty())) {
        verdict.expect(std::isnan(float(got[at * kDim])) && std::isnan(got_lse[at]));
        continue;
      }
      double sum = 0, sums[kDim] = {};
      for (int column : row < 0 ? std::vector<int>() : listed[head * rows + row]) {
        const int begin = column << c.block_shift, end = std::min(begin + (1 << c.block_shift), position + 1);
        for (int k = begin; k < end; ++k) {
          const size_t first = (size_t(cu_k[seq] + k) * c.kv_heads + head / (c.heads / c.kv_heads)) * kDim;
          double logit = 0;
          for (int d = 0; d < kDim; ++d) logit += double(float(q[d])) * double(float(key[first + d]));
          const double weight = std::exp(logit * params.scale);
          sum += weight;
          for (int d = 0; d < kDim; ++d) sums[d] += weight * double(float(value[first + d]));
        }
      }
      if (sum == 0) {
        verdict.expect(got_lse[at] == -INFINITY);
      } else {
        verdict.add(std::abs(got_lse[at] - std::log(sum)));
      }
      for (int d = 0; d < kDim; ++d) {
        verdict.add(std::abs(float(got[at * kDim + d]) - (sum == 0 ? 0 : sums[d] / sum)));
      }
    }
  }
  return verdict.tell(std::string(c.name) + (by_lists ? ", by lists" : ""));
}

}  // namespace

int main() {
  const std::vector<Case> cases = {
      {"one prompt", {{300, 300}}, 4, 2, 7, 7, 0.5},
      {"mixed", {{130, 300}, {1, 200}, {0, 0}, {5, 3}, {128, 128}, {1, 0}}, 4, 1, 7, 7, 0.6, 150, true},
      {"large blocks", {{200, 700}, {100, 100}}, 2, 2, 8, 9, 0.6},
      {"many columns", {{130, 40 * 128}}, 1, 1, 7, 7, 0.95},
      {"bad row", {{400, 400}}, 2, 2, 7, 7, 0.9, 0, false, 2},
      {"bad length", {{200, 200}, {50, 50}}, 2, 2, 7, 7, 0.9, 0, false, -1, true},
  };
  bool right = true;
  for (const Case& c : cases) {
    for (const bool by_lists : {false, true}) {
      right &= run<__nv_bfloat16>(c, ElementType::kBfloat16, 2e-2f, by_lists);
      right &= run<__half>(c, ElementType::kFloat16, 4e-3f, by_lists);
    }
  }
  return right ? 0 : 1;
}
