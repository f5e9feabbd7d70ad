// Scores of a page: tokens x query rows, the tokens' bytes from registers.
#pragma once

#include "mla/sm90/dense/products.h"
#include "mla/sm90/turned/layout.h"
#include "mla/sm90/turned/smem_plan.h"
#include "ptx/mbarrier.h"
#include "ptx/wgmma.h"
#include "sm90/e4m3.h"

namespace pallas_attn::mla::sm90::turned {

// Of a thread's two tokens: a power of two near the largest scale, in which their scores are, and the largest
// of all.
struct TokenScales {
  float unit[kRowsPerThread];
  float peak;
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

__device__ __forceinline__ TokenScales load_scales(const char* page, const Place& at) {
  TokenScales scales;
  scales.peak = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(scales_of(page, at.token(i)));
    const float peak = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    scales.peak = fmaxf(scales.peak, peak);
    scales.unit[i] = unit_of(peak);
  }
  return scales;
}

// The sums of a block's bytes are in its scale. Those up to block `before` go over to the scale of the next
// one, or behind the last to the token's unit. A scale that is next to nothing beside the token's largest
// counts as 2^-26 units, so that there is something to divide by.
template <int kAccumulators>
__device__ __forceinline__ void change_scale(float (&rS)[kAccumulators], const char* page, int before,
                                             const TokenScales& scales, const Place& at) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const float unit = scales.unit[i], least = unit * 0x1p-26f;
    const float* given = scales_of(page, at.token(i));
    // NaN stays.
    const auto scale_of = [&](int block) { return fabsf(given[block]) < least ? least : given[block]; };
    const float ratio = __fdividef(scale_of(before), before + 1 < kBlocks ? scale_of(before + 1) : unit);
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 4) {
      rS[j + i * 2] *= ratio;
      rS[j + i * 2 + 1] *= ratio;
    }
  }
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

// Step `step` of rotary numbers, in the units of the token's latents: exact.
__device__ __forceinline__ void rope_fragment(const TokenChunks& chunks, int step,
                                              const float (&unit)[kRowsPerThread], uint32_t (&fragment)[4]) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const __nv_bfloat162 inverse = __float2bfloat162_rn(inverse_power_of_two(unit[i]));
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint32_t word = chunks.word[i][step * 2 + upper];
      const __nv_bfloat162 v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(word), inverse);
      fragment[i + upper * 2] = reinterpret_cast<const uint32_t&>(v);
    }
  }
}

// The A operand of step `step` of a page's 36, from the chunks that it lies in.
__device__ __forceinline__ void score_fragment(const TokenChunks& chunks, int step, const TokenScales& scales,
                                               uint32_t (&fragment)[4]) {
  if (step < kLatentSteps) {
    latent_fragment(chunks, step % kByteSteps, fragment);
  } else {
    rope_fragment(chunks, step % kRopeSteps, scales.unit, fragment);
  }
}

// Chunks are numbered through all blocks. The last step that takes one's bytes, or another.
constexpr int chunks_of_step(int step) {
  return step < kLatentSteps ? step / kByteSteps
                             : kLatentSteps / kByteSteps + (step - kLatentSteps) / kRopeSteps;
}

// rS = K Q^T, each token's row in its own unit. While the products of a chunk's steps run, the next ones'
// operands are converted.
template <typename Plan, int kAccumulators>
__device__ __forceinline__ void multiply_scores(float (&rS)[kAccumulators], const TokenScales& scales,
                                                const Plan& smem, int stage, const Place& at) {
  constexpr int kAtOnce = kByteSteps;
  static_assert(kQuerySteps % kAtOnce == 0);
  const char* page = smem.pages[stage];
  const uint64_t query = ptx::wgmma_descriptor(smem.query, 0);
  uint32_t fragments[2][kAtOnce][4];
  ptx::wgmma_touch(rS);
  TokenChunks chunks = load_chunks(page, at, 0, 0);
#pragma unroll
  for (int first = 0; first < kQuerySteps; first += kAtOnce) {
    uint32_t (&own)[kAtOnce][4] = fragments[first / kAtOnce % 2];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = first + i, chunk = chunks_of_step(step);
      score_fragment(chunks, step, scales, own[i]);
      // Sent for as soon as there is room.
      if (step + 1 < kQuerySteps && chunks_of_step(step + 1) > chunk) {
        chunks = load_chunks(page, at, (chunk + 1) / 2, (chunk + 1) % 2);
      }
    }
    ptx::wgmma_touch(own);
    if (first > 0 && first <= kLatentSteps && first % kBlockSteps == 0) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(rS);
      change_scale(rS, page, first / kBlockSteps - 1, scales, at);
      ptx::wgmma_touch(rS);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int step = first + i;
      const uint64_t operand =
          ptx::advance_descriptor(query, step / kStepsPerPiece * sizeof(typename Plan::Piece) +
                                             step % kStepsPerPiece * kStepDims * 2);
      const uint32_t (&fragment)[4] = own[i];
      if (step < kLatentSteps) {
        ptx::wgmma_k16<__half, ptx::kKMajor>(rS, fragment, operand, step > 0);
      } else {
        ptx::wgmma_k16<__nv_bfloat16, ptx::kKMajor>(rS, fragment, operand, true);
      }
    }
    ptx::wgmma_commit();
    // The fragments written next are those of the products before these.
    ptx::wgmma_wait<1>();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(rS);
}

}  // namespace pallas_attn::mla::sm90::turned
