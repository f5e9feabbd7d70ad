// The CUDA MLA kernels on a few tiny batches, without XLA: what the sanitizers run (make sanitize).
//
// The batches reach every kernel and branch: empty and cut requests, lengths around a page's edge, rows that
// fill no tile, a page outside the pool, all ways of merging, both element types, two KV
// heads. Results are compared with double precision, so that a clean report is one of kernels that did their
// work.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/math.h"
#include "mla/params.h"
#include "mla/schedule/schedule.h"
#include "mla/sm90/dense/launch.h"
#include "smoke.h"

namespace {

using namespace pallas_attn;

template <typename Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12050, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) check(cudaErrorSymbolNotFound, name);
  return reinterpret_cast<Function>(entry);
}

#define DRIVER(name, ...) \
  check(static_cast<cudaError_t>(driver_function<decltype(&name)>(#name)(__VA_ARGS__)), #name)

// A stream of a green context, which has some of the multiprocessors: the runtime counts all of them, and a
// cooperative launch of more CTAs than fit on these is refused.
cudaStream_t stream_on_some_multiprocessors(int count) {
  check(cudaFree(nullptr), "starting the runtime");
  CUdevResource all, some, rest;
  unsigned groups = 1;
  CUdevResourceDesc description;
  CUgreenCtx context;
  CUstream stream;
  DRIVER(cuDeviceGetDevResource, 0, &all, CU_DEV_RESOURCE_TYPE_SM);
  DRIVER(cuDevSmResourceSplitByCount, &some, &groups, &all, &rest, 0, count);
  DRIVER(cuDevResourceGenerateDesc, &description, &some, 1);
  DRIVER(cuGreenCtxCreate, &context, description, 0, CU_GREEN_CTX_DEFAULT_STREAM);
  DRIVER(cuGreenCtxStreamCreate, &stream, context, CU_STREAM_NON_BLOCKING, 0);
  return stream;
}

struct Case {
  const char* name;
  std::vector<int> seq_lens;
  int num_kv_heads, query_len, group;
  int num_sm_parts;
  int bad_request = -1;  // uses a page outside the pool
  int pages_each = 12;   // width of the block table
  int overhead_pages = 1;
  bool merge_apart = false;
  int multiprocessors = 0;  // 0 for all
  bool bytes = false;       // tokens of 656 bytes
};

// Tokens of one KV head in 656 bytes each; they become what is read back. Tokens of NaN are bytes of 0xFF.
template <typename Element>
std::vector<uint8_t> quantized(std::vector<Element>& cache) {
  const size_t tokens = cache.size() / mla::kQueryDim;
  std::vector<uint8_t> packed(tokens * mla::kTokenBytes, 0xFF);
  for (size_t t = 0; t < tokens; ++t) {
    Element* token = &cache[t * mla::kQueryDim];
    uint8_t* bytes = &packed[t * mla::kTokenBytes];
    if (std::isnan(float(token[0]))) continue;
    for (int group = 0; group < mla::kLatentDim / mla::kScaleGroup; ++group) {
      Element* values = token + group * mla::kScaleGroup;
      float peak = 0;
      for (int d = 0; d < mla::kScaleGroup; ++d) peak = std::fmax(peak, std::fabs(float(values[d])));
      // Few enough bits that scale times e4m3 is exact in bf16, which the comparison takes the cache from.
      int exponent;
      const float fraction = std::frexp(peak / 448, &exponent);
      const float scale = std::ldexp(std::ceil(fraction * 16), exponent - 4);
      std::memcpy(bytes + mla::kScalesAt + 4 * group, &scale, 4);
      for (int d = 0; d < mla::kScaleGroup; ++d) {
        const __nv_fp8_e4m3 small(float(values[d]) / scale);
        bytes[group * mla::kScaleGroup + d] = small.__x;
        values[d] = Element(float(small) * scale);
      }
    }
    std::memcpy(bytes + mla::kRopeAt, token + mla::kLatentDim, 2 * mla::kRopeDim);
  }
  return packed;
}

template <typename Element>
void run(const Case& c, ElementType element) {
  const int batch = c.seq_lens.size();
  const int pages_each = c.pages_each, num_pages = batch * pages_each;
  const int rows = c.query_len * c.group;
  const size_t slot = static_cast<size_t>(c.num_kv_heads) * mla::kQueryDim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;

  std::vector<int> tables(num_pages);
  if (num_pages % 7 == 0) check(cudaErrorUnknown, "a case with a multiple of 7 pages");
  for (int i = 0; i < num_pages; ++i) tables[i] = (i * 7 + 3) % num_pages;
  std::vector<Element> query(batch * c.num_kv_heads * rows * mla::kQueryDim),
      cache(num_pages * mla::kPageTokens * slot);
  for (Element& x : query) x = Element(normal(random));
  for (Element& x : cache) x = Element(normal(random));
  for (int i = 0; i < batch; ++i) {  // slots nobody owns
    for (int token = c.seq_lens[i]; token < pages_each * mla::kPageTokens; ++token) {
      const size_t page = tables[i * pages_each + token / mla::kPageTokens];
      for (size_t d = 0; d < slot; ++d)
        cache[(page * mla::kPageTokens + token % mla::kPageTokens) * slot + d] = Element(NAN);
    }
  }
  const std::vector<int> good_tables = tables;
  if (c.bad_request >= 0) tables[c.bad_request * pages_each] = num_pages;

  mla::DecodeParams params = {};
  params.query = on_device(query);
  if (c.bytes) {
    params.latent_cache = on_device(quantized(cache));
    params.format = mla::LatentFormat::kBytes;
  } else {
    params.latent_cache = on_device(cache);
  }
  params.block_tables = on_device(tables);
  params.seq_lens = on_device(c.seq_lens);
  const size_t all_rows = static_cast<size_t>(batch) * c.num_kv_heads * rows;
  const size_t partial_rows = static_cast<size_t>(2 * c.num_sm_parts) * c.num_kv_heads * rows;
  Element* out = filled_with_nan<Element>(all_rows * mla::kLatentDim);
  int* schedule = unwritten<int>(c.num_sm_parts * mla::kScheduleFields);
  int* num_splits = unwritten<int>(batch + 1);
  params.out = out;
  params.lse = unwritten<float>(all_rows);
  params.partial_out = filled_with_nan<float>(partial_rows * mla::kLatentDim);
  params.partial_lse = unwritten<RowLse>(partial_rows);
  params.schedule = schedule;
  params.num_splits = num_splits;
  params.batch = batch;
  params.num_kv_heads = c.num_kv_heads;
  params.query_len = c.query_len;
  params.group = c.group;
  params.num_pages = num_pages;
  params.max_blocks = pages_each;
  params.num_sm_parts = c.num_sm_parts;
  params.scale = 1.0f / 24.0f;
  params.causal = true;
  params.merge_apart = c.merge_apart;
  params.element = element;

  mla::ScheduleParams sharing = {};
  sharing.seq_lens = params.seq_lens;
  sharing.schedule = schedule;
  sharing.num_splits = num_splits;
  sharing.batch = batch;
  sharing.num_sm_parts = c.num_sm_parts;
  sharing.overhead_pages = c.overhead_pages;
  sharing.rows = rows;

  const cudaStream_t stream = c.multiprocessors == 0 ? stream_on_all_multiprocessors()
                                                     : stream_on_some_multiprocessors(c.multiprocessors);
  check(mla::launch_schedule(sharing, stream));
  check(mla::sm90::launch_dense_decode(params, stream));
  check(cudaStreamSynchronize(stream), "running");

  const auto result = on_host(out, all_rows * mla::kLatentDim);
  const auto lse = on_host(params.lse, all_rows);
  const int cut = on_host(num_splits, batch + 1).back() - batch;
  double worst = 0;
  for (int i = 0; i < batch; ++i) {
    for (int h = 0; h < c.num_kv_heads; ++h) {
      for (int row = 0; row < rows; ++row) {
        const size_t index = (static_cast<size_t>(i) * c.num_kv_heads + h) * rows + row;
        const int seen = c.seq_lens[i] - c.query_len + 1 + row / c.group;
        std::vector<double> sum(mla::kLatentDim);
        double total = 0;
        for (int token = 0; token < seen; ++token) {
          const size_t page = good_tables[i * pages_each + token / mla::kPageTokens];
          const Element* key =
              &cache[(page * mla::kPageTokens + token % mla::kPageTokens) * slot + h * mla::kQueryDim];
          double score = 0;
          for (int d = 0; d < mla::kQueryDim; ++d)
            score += double(float(query[index * mla::kQueryDim + d])) * float(key[d]);
          const double weight = std::exp(score / 24.0);
          total += weight;
          for (int d = 0; d < mla::kLatentDim; ++d) sum[d] += weight * float(key[d]);
        }
        double error = 0, size = 0;
        for (int d = 0; d < mla::kLatentDim; ++d) {
          const double want = total > 0 ? sum[d] / total : 0,
                       got = float(result[index * mla::kLatentDim + d]);
          if (i == c.bad_request ? !std::isnan(got) : std::isnan(got))
            check(cudaErrorUnknown, "NaN out of place");
          error += (got - want) * (got - want);
          size += want * want;
        }
        const int token = row / c.group, heads = c.num_kv_heads * c.group;
        const size_t lse_index =
            (static_cast<size_t>(i) * c.query_len + token) * heads + h * c.group + row % c.group;
        const double got = lse[lse_index], want = std::log(total);  // log(0) is -inf
        if (i == c.bad_request) {
          if (!std::isnan(got)) check(cudaErrorUnknown, "a log-sum-exp that should be NaN");
          continue;
        }
        if (got != want && !(std::fabs(got - want) < 1e-3)) check(cudaErrorUnknown, "wrong log-sum-exp");
        worst = std::fmax(worst, std::sqrt(error / (size > 0 ? size : 1)));
      }
    }
  }
  std::printf("%s: %d pieces more than requests, worst row %.1e\n", c.name, cut, worst);
  if (worst > 8e-3) check(cudaErrorUnknown, "wrong result");
}

// The schedule kernel with more requests than the cases above, against dealing part by part.
void run_schedule(int batch, int num_parts, int overhead) {
  std::mt19937 random(batch);
  std::vector<int> seq_lens(batch);
  for (int& length : seq_lens) length = random() % 4 == 0 ? 0 : random() % 3000;
  const auto pages_of = [&](int i) { return ceil_div(seq_lens[i], mla::kPageTokens); };
  int work = batch * overhead;
  for (int i = 0; i < batch; ++i) work += pages_of(i);
  const int payload = std::max(ceil_div(work, num_parts) + overhead, 2 * overhead);

  mla::ScheduleParams params = {};
  params.seq_lens = on_device(seq_lens);
  params.schedule = unwritten<int>(num_parts * mla::kScheduleFields);
  params.num_splits = unwritten<int>(batch + 1);
  params.batch = batch;
  params.num_sm_parts = num_parts;
  params.overhead_pages = overhead;
  params.rows = 16;
  const cudaStream_t stream = stream_on_all_multiprocessors();
  check(mla::launch_schedule(params, stream));
  check(cudaStreamSynchronize(stream), "making a schedule");
  const auto schedule = on_host(params.schedule, num_parts * mla::kScheduleFields);
  const auto num_splits = on_host(params.num_splits, batch + 1);

  int request = 0, page = 0, wrong = 0;  // where work has come to
  std::vector<int> splits(batch + 1);
  for (int part = 0; part < num_parts; ++part) {
    const int begin[3] = {request, page * mla::kPageTokens, page > 0 ? splits[request] : 0};
    for (int left = payload; request < batch; ++request, page = 0) {
      const int rest = pages_of(request) - page;
      splits[request] += rest + overhead <= left || left > overhead;
      if (rest + overhead > left) {
        page += std::max(0, left - overhead);
        break;
      }
      left -= rest + overhead;
    }
    const int* row = &schedule[part * mla::kScheduleFields];
    const int end[2] = {page > 0 ? request : request - 1,
                        page > 0 ? page * mla::kPageTokens : seq_lens[request - 1]};
    wrong += row[mla::kBeginRequest] != begin[0] || row[mla::kBeginToken] != begin[1] ||
             row[mla::kBeginSplit] != begin[2] || row[mla::kEndRequest] != end[0] ||
             row[mla::kEndToken] != end[1];
  }
  for (int i = 0, before = 0; i <= batch; before += splits[i++]) wrong += num_splits[i] != before;
  std::printf("schedule of %d requests for %d parts: %d differences\n", batch, num_parts, wrong);
  if (wrong > 0) check(cudaErrorUnknown, "wrong schedule");
}

void run_schedules() {
  run_schedule(1, 132, 1);
  run_schedule(128, 132, 2);
  run_schedule(1500, 132, 5);
  run_schedule(700, 4096, 1);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && arguments[1] == std::string("--schedules")) {
    run_schedules();
    return 0;
  }
  if (count > 1 && arguments[1] == std::string("--few-multiprocessors")) {
    run<__nv_bfloat16>({"more CTAs than multiprocessors in reach",
                        {640, 640, 640, 600},
                        1,
                        1,
                        128,
                        44,
                        -1,
                        12,
                        1,
                        false,
                        16},
                       ElementType::kBfloat16);
    return 0;
  }
  // Somebody else's mistake, left on the thread's record, is none of our launches'.
  if (cudaSetDevice(1 << 20) == cudaSuccess) check(cudaErrorUnknown, "a device there cannot be");
  run_schedules();
  run<__nv_bfloat16>({"mixed lengths, heads in one tile", {0, 1, 64, 65, 300}, 1, 1, 16, 4},
                     ElementType::kBfloat16);
  run<__half>({"two tokens, two KV heads, two tiles", {130, 200}, 2, 2, 40, 3}, ElementType::kFloat16);
  run<__nv_bfloat16>({"many splits, few rows", {640}, 1, 1, 2, 10}, ElementType::kBfloat16);
  run<__nv_bfloat16>({"many splits, two tiles", {640}, 1, 1, 128, 10}, ElementType::kBfloat16);
  run<__half>({"many splits, many rows", {640, 640, 640, 600}, 1, 1, 128, 44}, ElementType::kFloat16);
  run<__nv_bfloat16>({"more requests than parts", {70, 300, 0, 64, 500, 90}, 1, 1, 64, 4},
                     ElementType::kBfloat16);
  run<__half>({"many splits, merged behind", {640, 640, 640, 600}, 1, 1, 128, 44, -1, 12, 1, true},
              ElementType::kFloat16);
  run<__nv_bfloat16>({"an overhead that suits the lengths",
                      {640, 700, 640, 640, 690, 640, 640, 640},
                      1,
                      1,
                      64,
                      9,
                      -1,
                      16,
                      0},
                     ElementType::kBfloat16);
  run<__nv_bfloat16>({"a page outside the pool", {200, 150}, 1, 1, 16, 3, 1}, ElementType::kBfloat16);
  run<__nv_bfloat16>({"dozens of splits, few rows", {4600}, 1, 1, 20, 72, -1, 72}, ElementType::kBfloat16);
  run<__nv_bfloat16>({"dozens of splits, two tiles", {4600}, 1, 1, 128, 66, -1, 72}, ElementType::kBfloat16);
  run<__half>({"more parts than multiprocessors", {4600, 200, 0, 640}, 1, 1, 40, 300, -1, 72},
              ElementType::kFloat16);
  const auto run_bytes = [](Case c) {
    c.bytes = true;
    run<__nv_bfloat16>(c, ElementType::kBfloat16);
  };
  run_bytes({"bytes: mixed lengths", {0, 1, 64, 65, 300}, 1, 1, 16, 4});
  run_bytes({"bytes: two tokens, two KV heads, two tiles", {130, 200}, 2, 2, 40, 3});
  run_bytes({"bytes: many splits", {640, 640, 640, 600}, 1, 1, 128, 44});
  run_bytes(
      {"bytes: requests without pages between others", {70, 0, 0, 64, 500, 0, 90, 0}, 1, 1, 64, 3, -1, 9});
  run_bytes({"bytes: one part", {70, 300, 0, 640, 5}, 1, 1, 64, 1});
  run_bytes({"bytes: a page outside the pool", {200, 150}, 1, 1, 16, 3, 1});
  run_bytes({"bytes: rows of half a tile, dozens of splits", {4600}, 1, 1, 20, 72, -1, 72});
  run_bytes({"bytes: two tiles, dozens of splits", {4600}, 1, 1, 128, 66, -1, 72});
  run_bytes({"bytes: merged behind", {640, 640, 640, 600}, 1, 1, 128, 44, -1, 12, 1, true});
  run_bytes({"bytes: three tokens of few heads", {130, 66, 3, 2, 1, 640}, 1, 3, 8, 4});
  return 0;
}
