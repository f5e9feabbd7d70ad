// Scores of a page: tokens x query rows, the tokens' bytes from registers.
#pragma once

#include "mla/sm90/dense/products.h"
#include "mla/sm90/transposed/layout.h"
#include "mla/sm90/transposed/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90::transposed {

// Scores of a thread's two tokens. The sums of a block's bytes are in its scale, so that something has to be
// done with them between blocks. With few rows the blocks' sums are in two sets in turn, and are added up
// while the next one's products run. With 64 rows there are no registers for a second set: the sums change
// their scale between blocks, when all products are done.
template <int kRows>
struct Scores {
  static constexpr bool kAddsUp = kRows < 64;
  static constexpr int kHeld = accumulators(kRows);
  float sums[kHeld];

  // Of token i and row j * 8 + pair * 2 + right.
  __device__ float& at(int j, int i, int right) { return sums[j * 4 + i * 2 + right]; }
  __device__ float at(int j, int i, int right) const { return sums[j * 4 + i * 2 + right]; }
};

// Of a thread's two tokens: by what sums are multiplied behind block `pair`, and the largest scale of all.
// Each lane of a quad knows one block of the tokens they share.
struct TokenScales {
  float behind_block[kRowsPerThread];
  float peak;

  __device__ __forceinline__ void tell(int block, const Place& at, float (&factor)[kRowsPerThread]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      factor[i] = __shfl_sync(0xffffffff, behind_block[i], at.lane / 4 * 4 + block);
    }
  }
};

__device__ __forceinline__ __half2 as_halves(uint32_t word) { return reinterpret_cast<__half2&>(word); }
__device__ __forceinline__ uint32_t as_word(__half2 halves) { return reinterpret_cast<uint32_t&>(halves); }

// The power of two at or below x, and its inverse.
constexpr uint32_t kExponentBits = 0x7F800000;
__device__ __forceinline__ float power_of_two_below(float x) {
  return __uint_as_float(__float_as_uint(x) & kExponentBits);
}
__device__ __forceinline__ float inverse_power_of_two(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// Units stay where their inverse is a normal number too.
constexpr float kLeastUnit = 0x1p-100f, kMostUnit = 0x1p100f;
__device__ __forceinline__ float unit_of(float peak) {
  return power_of_two_below(fminf(fmaxf(peak, kLeastUnit), kMostUnit));
}

__device__ __forceinline__ const float* scales_of(const char* page, int token) {
  return reinterpret_cast<const float*>(page + token * kTokenBytes + kScalesAt);
}

// Where sums change their scale, it becomes that of the next block, or behind the last one they become what
// they are. A scale that is next to nothing beside the token's largest counts as 2^-26 of it then, so that
// there is something to divide by. Of a page that must not be read comes NaN.
template <bool kAddsUp>
__device__ __forceinline__ TokenScales load_scales(const char* page, bool bad_page, const Place& at) {
  TokenScales scales;
  scales.peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const float* given = scales_of(page, at.token(i));
    const float4 v = *reinterpret_cast<const float4*>(given);
    const float peak = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    scales.peak = fmaxf(scales.peak, peak);
    float& factor = scales.behind_block[i];
    if constexpr (kAddsUp) {
      factor = given[at.pair];
    } else {
      const float least = fminf(fmaxf(peak, kLeastUnit), kMostUnit) * 0x1p-26f;
      // NaN stays.
      const auto at_least = [&](float scale) { return fabsf(scale) < least ? least : scale; };
      const bool last = at.pair == kBlocks - 1;
      const float own = at_least(given[at.pair]), next = at_least(given[at.pair + !last]);
      factor = __fdividef(own, last ? 1.0f : next);
    }
    factor *= bad_page ? NAN : 1.0f;
  }
  return scales;
}

template <int kHeld>
__device__ __forceinline__ void change_scale(float (&sums)[kHeld], const float (&ratio)[kRowsPerThread]) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) sums[r] *= ratio[r / 2 % 2];
}

template <int kHeld>
__device__ __forceinline__ void add_block(float (&all)[kHeld], const float (&sums)[kHeld],
                                          const float (&factor)[kRowsPerThread]) {
#pragma unroll
  for (int r = 0; r < kHeld; ++r) all[r] += sums[r] * factor[r / 2 % 2];
}

// 16 bytes of each of a thread's two tokens, word by word.
struct TokenChunks {
  uint32_t word[kRowsPerThread][4];
};

__device__ __forceinline__ TokenChunks load_chunks(const char* page, const Place& at, int block, int half) {
  TokenChunks chunks;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const uint4 v =
        *reinterpret_cast<const uint4*>(page + at.token(i) * kTokenBytes + chunk_at(block, half, at.pair));
    chunks.word[i][0] = v.x, chunks.word[i][1] = v.y, chunks.word[i][2] = v.z, chunks.word[i][3] = v.w;
  }
  return chunks;
}

// Steps of 16 that chunks are: four of bytes, two of bf16.
constexpr int kByteSteps = 4, kRopeSteps = 2, kBlockSteps = kScaleGroup / kStepDims;
constexpr int kLatentSteps = kLatentDim / kStepDims;

// Step `step` of latent bytes as the A operand: exact.
__device__ __forceinline__ void latent_fragment(const TokenChunks& chunks, int step,
                                                uint32_t (&fragment)[4]) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const FourHalves halves = halves_of(chunks.word[i][step]);
    fragment[i] = as_word(halves.low);
    fragment[i + 2] = as_word(halves.high);
  }
}

// The A operand of step `step` of a page's 36, from the chunks that it lies in: exact.
__device__ __forceinline__ void score_fragment(const TokenChunks& chunks, int step, uint32_t (&fragment)[4]) {
  if (step < kLatentSteps) {
    latent_fragment(chunks, step % kByteSteps, fragment);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    fragment[i] = chunks.word[i][step % kRopeSteps * 2];
    fragment[i + 2] = chunks.word[i][step % kRopeSteps * 2 + 1];
  }
}

// Chunks are numbered through all blocks. The last step that takes one's bytes, or another.
constexpr int chunks_of_step(int step) {
  return step < kLatentSteps ? step / kByteSteps
                             : kLatentSteps / kByteSteps + (step - kLatentSteps) / kRopeSteps;
}

// Steps whose operands are converted together.
constexpr int kAtOnce = kByteSteps;
static_assert(kQuerySteps % kAtOnce == 0);
using StepFragments = uint32_t[kAtOnce][4];

// The operands of steps from `first` on. The chunks behind are sent for as soon as there is room.
__device__ __forceinline__ void convert_steps(StepFragments& fragments, TokenChunks& chunks, int first,
                                              const char* page, const Place& at) {
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int step = first + i, chunk = chunks_of_step(step);
    score_fragment(chunks, step, fragments[i]);
    if (step + 1 < kQuerySteps && chunks_of_step(step + 1) > chunk) {
      chunks = load_chunks(page, at, (chunk + 1) / 2, (chunk + 1) % 2);
    }
  }
  ptx::wgmma_touch(fragments);
}

// Their products with the query.
template <typename Plan, int kHeld>
__device__ __forceinline__ void send_steps(float (&sums)[kHeld], const StepFragments& fragments, int first,
                                           uint64_t query, bool fresh) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int step = first + i;
    const uint64_t operand = ptx::advance_descriptor(
        query, step / kStepsPerPiece * sizeof(typename Plan::Piece) + step % kStepsPerPiece * kStepDims * 2);
    const uint32_t (&fragment)[4] = fragments[i];
    const bool accumulate = i > 0 || !fresh;
    if (step < kLatentSteps) {
      ptx::wgmma_k16<__half, ptx::kKMajor>(sums, fragment, operand, accumulate);
    } else {
      ptx::wgmma_k16<__nv_bfloat16, ptx::kKMajor>(sums, fragment, operand, accumulate);
    }
  }
  ptx::wgmma_commit();
}

// Until all products are done, of which `sums` are the last.
template <int kHeld>
__device__ __forceinline__ void finish(float (&sums)[kHeld]) {
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(sums);
}

// rS = K Q^T. While the products of some steps run, the next ones' operands are converted.
template <typename Plan>
__device__ __forceinline__ void multiply_scores(Scores<Plan::kRows>& rS, const TokenScales& scales,
                                                const Plan& smem, int stage, const Place& at) {
  using Scores = Scores<Plan::kRows>;
  const char* page = smem.pages[stage];
  const uint64_t query = ptx::wgmma_descriptor(smem.query, 0);
  StepFragments fragments[2];
  // Where they are added up: of the newest two blocks.
  float sums[2][Scores::kHeld];
  float factor[kRowsPerThread];
  if constexpr (Scores::kAddsUp) {
#pragma unroll
    for (float& x : rS.sums) x = 0.0f;
#pragma unroll
    for (auto& set : sums) ptx::wgmma_touch(set);
  } else {
    ptx::wgmma_touch(rS.sums);
  }
  TokenChunks chunks = load_chunks(page, at, 0, 0);
#pragma unroll
  for (int first = 0; first < kQuerySteps; first += kAtOnce) {
    StepFragments& own = fragments[first / kAtOnce % 2];
    convert_steps(own, chunks, first, page, at);
    const int block = first / kBlockSteps;
    const bool starts = first % kBlockSteps == 0, ends_another = starts && block > 0;
    if (ends_another) scales.tell(block - 1, at, factor);
    if constexpr (Scores::kAddsUp) {
      send_steps<Plan>(sums[block % 2], own, first, query, starts);
    } else {
      if (ends_another) {
        finish(rS.sums);
        change_scale(rS.sums, factor);
        ptx::wgmma_touch(rS.sums);
      }
      send_steps<Plan>(rS.sums, own, first, query, first == 0);
    }
    // The fragments written next are those of the products before these.
    ptx::wgmma_wait<1>();
    if constexpr (Scores::kAddsUp) {
      if (!ends_another) continue;
      ptx::wgmma_touch(sums[(block - 1) % 2]);
      add_block(rS.sums, sums[(block - 1) % 2], factor);
      ptx::wgmma_touch(sums[(block - 1) % 2]);
    }
  }
  if constexpr (Scores::kAddsUp) {
    constexpr float kRopeScale[kRowsPerThread] = {1.0f, 1.0f};
    finish(sums[kBlocks % 2]);
    add_block(rS.sums, sums[kBlocks % 2], kRopeScale);
  } else {
    finish(rS.sums);
  }
}

}  // namespace pallas_attn::mla::sm90::transposed
