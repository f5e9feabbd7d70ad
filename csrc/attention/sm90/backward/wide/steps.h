// A held tile's steps where lists name the blocks that it meets, and which of their pairs count.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward_params.h"
#include "attention/sm90/backward/walk.h"
#include "attention/sm90/backward/wide/config.h"
#include "attention/sm90/backward/wide/layout_steps.h"
#include "common/load.h"
#include "sm90/fragment.h"

namespace pallas_attn::attention::sm90::backward::wide {

constexpr int kAllCount = -1;

// Head by head, each in the order of its list.
template <typename Pass>
class ListedSteps {
 public:
  int head = 0, met;
  // Which words of `bits` say what counts, of the tile's first 64 tokens; or kAllCount.
  int seen;

  __device__ __forceinline__ int first(const Tile&, int tokens) const { return met * tokens; }

  // Of a tile that has some.
  __device__ ListedSteps(const BackwardParams& params, const Tile& tile) {
    open(params, tile);
    look(params, tile);
  }
  __device__ __forceinline__ bool advance(const BackwardParams& params, const Tile& tile) {
    if ((++met & ((1 << met_shift(params)) - 1)) != 0) {
      if (seen >= 0) seen += Pass::kHoldsQueries ? 1 : 1 << (params.k_shift - kMetShift);
      return true;
    }
    if (--left_ > 0) {
      ++block_;
    } else {
      ++head;
      if (!open(params, tile)) return false;
    }
    look(params, tile);
    return true;
  }

  static __device__ __forceinline__ int count(const BackwardParams& params, const Tile& tile) {
    int blocks = 0;
    for (int head = 0; head < met_heads<Pass::kSide>(params); ++head)
      blocks += count_of(params, row(params, tile, head));
    return blocks << met_shift(params);
  }

 private:
  static __device__ __forceinline__ const BlockLists& lists(const BackwardParams& params) {
    return Pass::kHoldsQueries ? params.of_queries : params.of_keys;
  }
  static __device__ __forceinline__ int held_shift(const BackwardParams& params) {
    return Pass::kHoldsQueries ? params.q_shift : params.k_shift;
  }
  // Of tiles in a block.
  static __device__ __forceinline__ int met_shift(const BackwardParams& params) {
    return (Pass::kHoldsQueries ? params.k_shift : params.q_shift) - kMetShift;
  }
  static __device__ __forceinline__ int64_t row(const BackwardParams& params, const Tile& tile, int head) {
    const BlockLists& all = lists(params);
    const int own = Pass::kHoldsQueries ? tile.head : tile.head * params.group + head;
    const int64_t list = int64_t{all.batch > 1 ? tile.batch : 0} * all.heads + (all.heads > 1 ? own : 0);
    return list * all.rows + (tile.first >> held_shift(params));
  }
  static __device__ __forceinline__ int count_of(const BackwardParams& params, int64_t row) {
    return min(max(load_constant(lists(params).counts + row), 0), lists(params).pitch);
  }

  // The next head's list that names some, from `head` on.
  __device__ __forceinline__ bool open(const BackwardParams& params, const Tile& tile) {
    for (; head < met_heads<Pass::kSide>(params); ++head) {
      const int64_t own = row(params, tile, head);
      left_ = count_of(params, own);
      block_ = lists(params).blocks + own * lists(params).pitch;
      if (left_ > 0) return true;
    }
    return false;
  }
  __device__ __forceinline__ void look(const BackwardParams& params, const Tile& tile) {
    const int2 words = __ldg(reinterpret_cast<const int2*>(block_));
    // Nothing outside the arrays is read, whatever lists say.
    const BlockLists& others = Pass::kHoldsQueries ? params.of_keys : params.of_queries;
    met = min(max(words.x, 0), others.rows - 1) << met_shift(params);
    seen = kAllCount;
    // Of queries beyond what is kept the log-sum-exp is NaN, which must be seen.
    if (words.y < 0 || words.y >= params.max_bits) return;
    const int in_held = (tile.first & ((1 << held_shift(params)) - 1)) >> kMetShift;
    const int rows = params.q_shift - kMetShift, columns = params.k_shift - kMetShift;
    seen = (words.y << (rows + columns)) + (Pass::kHoldsQueries ? in_held << columns : in_held);
  }

  const ListedBlock* block_;
  int left_;  // blocks of the head's list, this one among them
};

template <typename Pass>
using StepsOf =
    std::conditional_t<Pass::kOfLayout, LayoutSteps<Pass>,
                       std::conditional_t<Pass::kListed, ListedSteps<Pass>, BandSteps<Pass::kSide>>>;

// Makes zero of what does not count, whatever it is, on a fragment of 64 held by 64 met tokens.
template <typename Pass, int kPairs>
__device__ __forceinline__ void mask_by_bits(float (&d)[kPairs], const BackwardParams& params, int seen,
                                             int warpgroup, int thread, const FragmentPosition& at) {
  static_assert(kPairs == 32);
  const int across = Pass::kHoldsQueries ? 1 << (params.k_shift - kMetShift) : 1;
  const uint32_t* words = params.bits + int64_t{seen + warpgroup * across} * kWarpgroupThreads;
  if constexpr (Pass::kHoldsQueries) {
    const uint32_t word = __ldg(words + thread);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      if ((word & 1u << r) == 0) d[r] = 0.0f;
    }
  } else {
    // Words are those of fragments of queries by keys. A query of each 16 and each two columns is another
    // thread's, who has these keys in the same quarter of its word.
    const int bit = at.warp * 8 + at.quad % 2;
#pragma unroll
    for (int r = 0; r < kPairs; r += 8) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int owner = r / 8 * 32 + (at.in_quad * 2 + side) * 4 + at.quad / 2;
        const uint32_t word = __ldg(words + owner) >> bit;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
#pragma unroll
          for (int i = 0; i < kRowsPerThread; ++i) {
            if ((word & 1u << (i * 4 + below * 2)) == 0) d[r + below * 4 + i * 2 + side] = 0.0f;
          }
        }
      }
    }
  }
}

}  // namespace pallas_attn::attention::sm90::backward::wide
