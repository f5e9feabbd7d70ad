// The sparse CUDA MLA kernels on a few tiny batches, without XLA: what the sanitizers run (make sanitize).
//
// The batches reach all feeders and their branches: rows of both formats and element types, ids that are
// rows and ids that are positions, -1, ids outside, lists of any length, none at all, tokens whole and cut,
// and the largest logits. Results are compared with double precision.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "common/math.h"
#include "mla/sm90/sparse/launch.h"
#include "smoke.h"

namespace {

using namespace pallas_attn;

struct Case {
  const char* name;
  std::vector<int> lengths;  // of each query token's list
  int heads, topk;
  int parts;
  bool whole = false;     // no token is cut, and the largest logits are asked for
  int page_size = 0;      // of positions
  int bad_token = -1;     // has an id outside the pool
  bool skip_all = false;  // where that is skipped
  bool sinks = false;     // a further logit of every head
};

constexpr int kRows = 300;

// Every part has as many tiles; `schedule` and `num_splits` as params.h describes them.
void deal(const Case& c, std::vector<int>& schedule, std::vector<int>& num_splits) {
  const int tokens = c.lengths.size(), tiles = ceil_div(c.topk, mla::kPageTokens);
  const int all = tokens * tiles;
  std::vector<int> pieces(tokens);
  schedule.assign(c.parts * mla::kScheduleFields, 0);
  for (int part = 0; part < c.parts; ++part) {
    const auto bound = [&](int i) {
      const int64_t exact = static_cast<int64_t>(i) * all / c.parts;
      return static_cast<int>(c.whole ? exact / tiles * tiles : exact);
    };
    const int begin = bound(part), end = bound(part + 1);
    int* row = &schedule[part * mla::kScheduleFields];
    row[mla::kBeginRequest] = begin == end ? tokens : begin / tiles;
    row[mla::kEndRequest] = begin == end ? tokens : (end - 1) / tiles;
    if (begin == end) continue;
    row[mla::kBeginToken] = begin % tiles * mla::kPageTokens;
    row[mla::kEndToken] = ((end - 1) % tiles + 1) * mla::kPageTokens;
    row[mla::kBeginSplit] = pieces[begin / tiles];
    for (int token = begin / tiles; token <= (end - 1) / tiles; ++token) ++pieces[token];
  }
  num_splits.assign(tokens + 1, 0);
  for (int token = 0; token < tokens; ++token) num_splits[token + 1] = num_splits[token] + pieces[token];
}

// A pool of random rows as bytes, and as the numbers that the kernel shall take them for: of bytes, as they
// are or `rounded` to elements.
template <typename Element>
void make_rows(mla::RowFormat format, bool rounded, std::mt19937& random, std::vector<char>& bytes,
               std::vector<float>& numbers) {
  std::normal_distribution<float> normal;
  numbers.resize(kRows * mla::kQueryDim);
  for (float& x : numbers) x = float(Element(normal(random)));
  if (format == mla::RowFormat::kPlain) {
    const std::vector<Element> elements(numbers.begin(), numbers.end());
    bytes.resize(elements.size() * sizeof(Element));
    std::memcpy(bytes.data(), elements.data(), bytes.size());
    return;
  }
  bytes.resize(kRows * 656);
  for (int row = 0; row < kRows; ++row) {
    char* to = &bytes[row * 656];
    float* of = &numbers[row * mla::kQueryDim];
    for (int group = 0; group < 4; ++group) {
      const float scale = 0.01f + 0.003f * group + 1e-5f * row;
      std::memcpy(to + mla::kLatentDim + 4 * group, &scale, 4);
      for (int d = 128 * group; d < 128 * group + 128; ++d) {
        const __nv_fp8_e4m3 small(of[d] / scale);
        to[d] = small.__x;
        of[d] = float(small) * scale;
        if (rounded) of[d] = float(Element(of[d]));
      }
    }
    for (int d = 0; d < mla::kRopeDim; ++d) {
      const Element x(of[mla::kLatentDim + d]);
      std::memcpy(to + mla::kLatentDim + 16 + 2 * d, &x, 2);
    }
  }
}

template <typename Element>
void run(const Case& c, mla::RowFormat format, bool wants_peaks) {
  const int tokens = c.lengths.size(), tiles = ceil_div(c.topk, mla::kPageTokens);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<char> pool;
  std::vector<float> numbers;
  make_rows<Element>(format, wants_peaks, random, pool, numbers);
  std::vector<Element> query(tokens * c.heads * mla::kQueryDim);
  for (Element& x : query) x = Element(normal(random));

  // Positions lead through a table that all tokens share, of pages in reverse.
  const int columns = c.page_size > 0 ? kRows / c.page_size : 1;
  std::vector<int> table(columns);
  for (int i = 0; i < columns; ++i) table[i] = columns - 1 - i;
  std::vector<int> ids(tokens * c.topk, 1 << 30);
  std::vector<std::vector<int>> rows(tokens);
  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < c.lengths[token]; ++i) {
      int& id = ids[token * c.topk + i];
      id = random() % 8 == 0 ? -1
                             : static_cast<int>(random() % (c.page_size > 0 ? columns * c.page_size : kRows));
      if (token == c.bad_token && i == c.lengths[token] / 2) {
        id = c.page_size > 0 ? columns * c.page_size : kRows;
      } else if (id >= 0) {
        rows[token].push_back(c.page_size > 0 ? table[id / c.page_size] * c.page_size + id % c.page_size
                                              : id);
      }
    }
  }

  // Rows that no id names are NaN.
  std::vector<bool> named(kRows);
  for (const auto& of_token : rows)
    for (const int row : of_token) named[row] = true;
  const size_t row_bytes = pool.size() / kRows;
  for (int row = 0; row < kRows; ++row)
    if (!named[row]) std::memset(&pool[row * row_bytes], 0xFF, row_bytes);

  std::vector<int> schedule, num_splits;
  deal(c, schedule, num_splits);
  const size_t all_rows = static_cast<size_t>(tokens) * c.heads;
  const size_t partial_rows = c.whole ? 0 : static_cast<size_t>(2 * c.parts) * c.heads;
  mla::SparseParams params = {};
  params.query = on_device(query);
  params.latent_cache = on_device(pool);
  params.block_tables = on_device(table);
  params.indices = on_device(ids);
  params.seq_lens = on_device(c.lengths);
  std::vector<float> sinks(c.heads);
  for (float& x : sinks) x = normal(random) + 3;
  sinks[0] = -INFINITY;  // as if there were none
  params.sinks = c.sinks ? on_device(sinks) : nullptr;
  params.schedule = on_device(schedule);
  params.num_splits = on_device(num_splits);
  Element* out = filled_with_nan<Element>(all_rows * mla::kLatentDim);
  params.out = out;
  params.lse = unwritten<float>(all_rows);
  params.max_logits = wants_peaks ? unwritten<float>(all_rows) : nullptr;
  if (!c.whole) {
    params.partial_out = filled_with_nan<float>(partial_rows * mla::kLatentDim);
    params.partial_lse = unwritten<RowLse>(partial_rows);
  }
  params.batch = tokens;
  params.query_len = params.num_kv_heads = 1;
  params.group = c.heads;
  params.max_blocks = tiles;
  params.num_sm_parts = c.parts;
  params.scale = 1.0f / 24.0f;
  params.element = std::is_same_v<Element, __half> ? ElementType::kFloat16 : ElementType::kBfloat16;
  params.topk = c.topk;
  params.set_pool(kRows, c.page_size);
  params.table_columns = columns;
  params.tokens_a_table = tokens;
  params.skip_all_outside = c.skip_all;
  params.nothing_is_cut = c.whole;
  params.format = format;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  check(mla::sm90::launch_sparse(params, stream));
  check(cudaStreamSynchronize(stream), "running");

  const auto result = on_host(out, all_rows * mla::kLatentDim);
  const auto lse = on_host(params.lse, all_rows);
  const auto peaks = wants_peaks ? on_host(params.max_logits, all_rows) : std::vector<float>(all_rows);
  double worst = 0;
  for (size_t index = 0; index < all_rows; ++index) {
    const int token = index / c.heads;
    const bool poisoned = token == c.bad_token && !c.skip_all;
    std::vector<double> sum(mla::kLatentDim);
    double total = 0, peak = -INFINITY, error = 0, size = 0;
    for (const int row : rows[token]) {
      const float* key = &numbers[row * mla::kQueryDim];
      double score = 0;
      for (int d = 0; d < mla::kQueryDim; ++d)
        score += double(float(query[index * mla::kQueryDim + d])) * key[d];
      peak = std::fmax(peak, score / 24);
      total += std::exp(score / 24);
      for (int d = 0; d < mla::kLatentDim; ++d) sum[d] += std::exp(score / 24) * key[d];
    }
    const double shared = total + (c.sinks ? std::exp(double(sinks[index % c.heads])) : 0);
    for (int d = 0; d < mla::kLatentDim; ++d) {
      const double want = total > 0 ? sum[d] / shared : 0, got = float(result[index * mla::kLatentDim + d]);
      if (std::isnan(got) != poisoned) check(cudaErrorUnknown, "NaN out of place");
      error += (got - want) * (got - want);
      size += want * want;
    }
    if (poisoned) {
      if (!std::isnan(lse[index])) check(cudaErrorUnknown, "a log-sum-exp that should be NaN");
      continue;
    }
    const auto differ = [](double got, double want) {
      return got != want && !(std::fabs(got - want) < 2e-3);
    };
    if (differ(lse[index], std::log(total))) check(cudaErrorUnknown, "wrong log-sum-exp");
    if (wants_peaks && differ(peaks[index], peak)) check(cudaErrorUnknown, "wrong largest logit");
    worst = std::fmax(worst, std::sqrt(error / (size > 0 ? size : 1)));
  }
  std::printf("%s%s%s: %d pieces more than tokens, worst row %.1e\n", c.name,
              format == mla::RowFormat::kFp8 ? ", bytes" : "", wants_peaks ? ", largest logits" : "",
              num_splits.back() - tokens, worst);
  if (worst > 8e-3) check(cudaErrorUnknown, "wrong result");
}

}  // namespace

int main() {
  const auto plain = mla::RowFormat::kPlain, bytes = mla::RowFormat::kFp8;
  const Case whole = {"whole tokens, lists of any length", {0, 1, 63, 64, 65, 200}, 16, 200, 3, true};
  const Case cut = {"tokens cut", {640, 600, 64, 640}, 70, 640, 11};
  const Case one = {"one token, many pieces, two tiles of heads", {2000}, 128, 2000, 30};
  const Case paged = {"positions", {130, 100, 7}, 5, 130, 3, false, 24};
  const Case bad = {"an id outside", {100, 128, 90}, 64, 128, 2, false, 0, 1};
  const Case skipped = {"ids outside, skipped", {100, 128, 90}, 64, 128, 2, true, 0, 1, true};
  Case pairs = whole, skipped_pairs = skipped;
  pairs.name = "whole tokens, two tiles of heads";
  skipped_pairs.name = "ids outside, skipped, two tiles of heads";
  pairs.heads = skipped_pairs.heads = 128;
  Case sinks_whole = whole, sinks_cut = cut, sinks_merged = one;
  sinks_whole.name = "sinks, whole tokens";
  sinks_cut.name = "sinks, cut";
  sinks_merged.name = "sinks, merged";
  sinks_whole.sinks = sinks_cut.sinks = sinks_merged.sinks = true;
  // Tokens that are whole tell their largest logits too. Over bytes that is a kernel of its own, as is,
  // without them, each tile of heads.
  for (const Case& c : {whole, pairs, skipped, skipped_pairs, sinks_whole}) {
    run<__nv_bfloat16>(c, plain, true);
    run<__nv_bfloat16>(c, bytes, true);
  }
  constexpr int kHeads[] = {5, 16, 30, 64, 128};
  int turn = 0;
  for (Case c : {whole, cut, one, paged, bad, skipped, sinks_whole, sinks_cut, sinks_merged}) {
    if (!c.whole) run<__nv_bfloat16>(c, plain, false);
    c.heads = kHeads[turn++ % 5];
    run<__nv_bfloat16>(c, bytes, false);
  }
  run<__half>(cut, plain, false);
  run<__half>(paged, plain, false);
  return 0;
}
