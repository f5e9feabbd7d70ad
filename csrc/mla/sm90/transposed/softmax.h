// From a page's scores to probabilities in shared memory, with what moves from page to page on the way.
//
// A warpgroup's thread has two tokens of many query rows, so that a row's maximum is known to nobody. But it
// is hardly ever needed: probabilities are relative to a base that follows the scores only when one of them
// would leave the range of halves. So they are made and stored first; whether any was too large is told by
// the vote behind which they are there anyway, and the rest is a rare branch, behind which they are made
// again. The unit of the value's numbers follows the scales in the same way.
#pragma once

#include <cmath>

#include "common/math.h"
#include "mla/sm90/transposed/named_barriers.h"
#include "mla/sm90/transposed/scores.h"
#include "sm90/online_softmax.h"

namespace pallas_attn::mla::sm90::transposed {

// When a probability would be larger than 2^15, the largest of that page becomes 2^7: below it halves have 31
// powers of two. What is asked is only whether a thread's two tokens have more together than a half can hold.
constexpr float kMostLog2 = 15.0f, kFreshLog2 = 7.0f, kMostOfTwo = 65504.0f;

// A scale is at most 2^7 units, so that a value, of 448 at most, is a half. When one would be larger, the
// largest of that page becomes 8 to 16 units.
constexpr float kMostUnits = 128.0f, kFreshUnits = 8.0f;

// Visits the row pairs a thread holds, with their number j in the fragment.
template <int kRows, typename Visit>
__device__ __forceinline__ void visit_row_pairs(Visit visit) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) visit(j);
}

// Whatever a run keeps in shared memory, before its first page; by that page's owner.
template <typename Plan>
__device__ __forceinline__ void reset_run(Plan& smem, int thread) {
  if (thread < Plan::kRows) smem.base[thread] = kNoMaximum;
  if (thread == 0) smem.unit = kLeastUnit;
}

// Moves base and unit to what this page needs, by its owner.
template <typename Plan>
__device__ __forceinline__ void move_base(const Scores<Plan::kRows>& rS, const TokenScales& scales,
                                          Plan& smem, const Place& at) {
  visit_row_pairs<Plan::kRows>([&](int j) {
    float2 peak = make_float2(fmaxf(rS.at(j, 0, 0), rS.at(j, 1, 0)), fmaxf(rS.at(j, 0, 1), rS.at(j, 1, 1)));
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      peak.x = fmaxf(peak.x, __shfl_xor_sync(0xffffffff, peak.x, distance));
      peak.y = fmaxf(peak.y, __shfl_xor_sync(0xffffffff, peak.y, distance));
    }
    if (at.line == 0) smem.warp_peak[at.warp].pair(at.row(j)) = peak;
  });
  float scale = scales.peak;
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    scale = fmaxf(scale, __shfl_xor_sync(0xffffffff, scale, distance));
  }
  if (at.lane == 0) smem.warp_scale[at.warp] = scale;
  meet_within(at.owner);
  const int row = at.thread();
  if (row < Plan::kRows) {
    float peak = -INFINITY;
    for (int warp = 0; warp < kWarpgroupWarps; ++warp) peak = fmaxf(peak, smem.warp_peak[warp][row]);
    const float factor = smem.row_factor[row], before = smem.base[row];
    // Where scores are so large that less than that is between neighbours, the base is the largest itself.
    const float fresh = fmaxf(peak - kFreshLog2 / factor, kNoMaximum);
    const float after = (peak - before) * factor > kMostLog2 ? fresh : before;
    smem.base[row] = after;
    // With nothing to rescale yet, by 0.
    smem.rescale[at.owner][row] = exp2_fast((before - after) * factor);
  }
  if (row == 0) {
    float peak = 0.0f;
    for (int warp = 0; warp < kWarpgroupWarps; ++warp) peak = fmaxf(peak, smem.warp_scale[warp]);
    const float before = smem.unit;
    const float after = peak > kMostUnits * before ? unit_of(peak / kFreshUnits) : before;
    smem.unit = after;
    smem.unit_rescale[at.owner] = before / after;
  }
  meet_within(at.owner);
}

// Sums of probabilities. All through a run a thread adds up its own tokens', for every row it holds: row pair
// j's in the places 2 j and 2 j + 1. At the end reduce() makes them those of the warp's tokens, of which each
// lane has kSums, the ones that were in the places from first() on.
template <int kRows>
struct RowSums {
  static constexpr int kHeld = kRows / 4, kSums = kHeld < 8 ? 1 : kHeld / 8;
  float of_row[kHeld];

  static __device__ __forceinline__ int first(int lane) {
    return (lane & 16 ? kHeld / 2 : 0) + (lane & 8 ? kHeld / 4 : 0) + (lane & 4 ? kHeld / 8 : 0);
  }
  static __device__ __forceinline__ int row(const Place& at, int i) {
    const int held = first(at.lane) + i;
    return at.row(held / 2) + held % 2;
  }

  // Adds up what the lanes of a column have. Each step hands half of the rows to a partner.
  __device__ __forceinline__ void reduce(int lane) {
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const int distance = 16 >> step, count = kHeld >> (step + 1);
      if (count == 0) of_row[0] += __shfl_xor_sync(0xffffffff, of_row[0], distance);
#pragma unroll
      for (int i = 0; i < kHeld / 2; ++i) {
        if (i >= count) continue;
        const bool upper = lane & distance;
        const float given = upper ? of_row[i] : of_row[i + count],
                    kept = upper ? of_row[i + count] : of_row[i];
        of_row[i] = kept + __shfl_xor_sync(0xffffffff, given, distance);
      }
    }
  }
};

// Scores become probabilities, stored in halves where products read them. What a thread has of each row is
// summed up in `held`. True if the base or the unit has to move.
template <typename Plan>
__device__ __forceinline__ bool store_probabilities(const Scores<Plan::kRows>& rS, const TokenScales& scales,
                                                    float (&held)[RowSums<Plan::kRows>::kHeld], Plan& smem,
                                                    const Place& at) {
  bool above = scales.peak > kMostUnits * smem.unit;
  // Transposed: matrices of eight rows by eight of this warp's sixteen tokens.
  const int row = at.lane / 16 * 8 + at.lane % 8, chunk = at.warp * 2 + at.lane / 8 % 2;
  const uint32_t to = ptx::shared_address(smem.probabilities[at.owner][row]) + ((chunk ^ (row & 7)) << 4);
  uint32_t matrices[4];
  visit_row_pairs<Plan::kRows>([&](int j) {
    const float2 factor = smem.row_factor.pair(at.row(j)), base = smem.base.pair(at.row(j));
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const float left = exp2_fast((rS.at(j, i, 0) - base.x) * factor.x);
      const float right = exp2_fast((rS.at(j, i, 1) - base.y) * factor.y);
      held[j * 2] = i == 0 ? left : held[j * 2] + left;
      held[j * 2 + 1] = i == 0 ? right : held[j * 2 + 1] + right;
      matrices[j % 2 * 2 + i] = ElementTraits<__half>::pack(left, right);
    }
    above |= held[j * 2] > kMostOfTwo || held[j * 2 + 1] > kMostOfTwo;
    if (j % 2 == 1) ptx::store_matrix_x4_transposed(to + (j - 1) * 8 * kRowBytes, matrices);
  });
  return above;
}

// By what the value's bytes become numbers in the run's unit. The four lanes of a quad have the same tokens
// and store a block's scales each.
template <typename Plan>
__device__ __forceinline__ void store_token_scales(Plan& smem, int stage, const Place& at) {
  const float inverse = inverse_power_of_two(smem.unit);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const char* scale = smem.pages[stage] + at.token(i) * kTokenBytes + kScalesAt + at.pair * 4;
    smem.token_scale[at.owner][at.pair][place_of_scale(at.token(i))] =
        __float2half_rn(*reinterpret_cast<const float*>(scale) * inverse);
  }
}

}  // namespace pallas_attn::mla::sm90::transposed
