// A held tile's steps where a layout's rows name the blocks that it meets. Places are those of tokens in
// their sequence, of which the last query stands at the last key; a query sees keys up to its own place.
#pragma once

#include <cstdint>

#include "attention/backward_params.h"
#include "attention/sm90/backward/walk.h"
#include "attention/sm90/backward/wide/config.h"
#include "common/load.h"

namespace pallas_attn::attention::sm90::backward::wide {

// Head by head, each in the order of its row. Of a row that does not ascend some blocks are left out, the
// same ones wherever it is walked.
template <typename Pass>
class LayoutSteps {
 public:
  int head = 0;
  // The met tile's number, times two; and whether all of its pairs count.
  int seen;

  // Of a tile that has some.
  __device__ LayoutSteps(const BackwardParams& params, const Tile& tile) : LayoutSteps(params, tile, 0) {
    open(params, tile);
    look(tile);
  }
  __device__ __forceinline__ bool advance(const BackwardParams& params, const Tile& tile) {
    if (++met_ == met_end_) {
      ++entry_;
      if (!find_block()) {
        ++head;
        if (!open(params, tile)) return false;
      }
    }
    look(tile);
    return true;
  }

  static __device__ __forceinline__ int count(const BackwardParams& params, const Tile& tile) {
    int tiles = 0;
    if (is_spoilt(params, tile)) return tiles;
    for (LayoutSteps steps(params, tile, 0); steps.open(params, tile); ++steps.head) {
      do {
        tiles += steps.met_end_ - steps.met_;
        ++steps.entry_;
      } while (steps.find_block());
    }
    return tiles;
  }
  // Whether a token's gradient is NaN, of a tile without steps. With some, each query sees a key of them, and
  // its log-sum-exp makes its gradient NaN.
  static __device__ __forceinline__ bool is_nan(const BackwardParams& params, const Tile& tile, int token) {
    if constexpr (Pass::kHoldsQueries) {
      const int64_t row = int64_t{tile.batch} * params.num_heads + tile.head;
      const float rest = __ldg(params.rest + row * params.q_len + tile.query + token);
      return rest != rest;
    } else {
      return is_spoilt(params, tile);
    }
  }

  static __device__ __forceinline__ bool all_count(int seen) { return (seen & 1) != 0; }
  // The first token of a step's met tile, as the sequence counts those of that side.
  static __device__ __forceinline__ int first_of(const Tile& tile, int seen) {
    return (seen >> 1) * kMet - (Pass::kHoldsQueries ? 0 : tile.band.offset);
  }
  __device__ __forceinline__ int first(const Tile& tile, int) const { return first_of(tile, seen); }

 private:
  __device__ __forceinline__ LayoutSteps(const BackwardParams& params, const Tile& tile, int first_head)
      : head(first_head), met_shift_((Pass::kHoldsQueries ? params.k_shift : params.q_shift) - kMetShift) {
    const int before = tile.band.offset;
    if constexpr (Pass::kHoldsQueries) {
      const int last = min(tile.first + kHeld, tile.band.q_len) - 1 + before;
      begin_ = 0, end_ = last < 0 ? 0 : (last >> kMetShift) + 1;
    } else {
      begin_ = max(max(before, tile.first), 0) >> kMetShift;
      end_ = tile.band.q_len == 0 ? 0 : ceil_div(tile.band.k_len, kMet);
    }
  }

  static __device__ __forceinline__ const SparseRows& rows(const BackwardParams& params) {
    return Pass::kHoldsQueries ? params.rows_of_queries : params.rows_of_keys;
  }
  static __device__ __forceinline__ int64_t list_of(const BackwardParams& params, const Tile& tile,
                                                    int head) {
    const int own = Pass::kHoldsQueries ? tile.head : tile.head * params.group + head;
    return rows(params).heads > 1 ? own : 0;
  }
  // Whether a query head's rows are unknown, and so whose gradients a KV head's are.
  static __device__ __forceinline__ bool is_spoilt(const BackwardParams& params, const Tile& tile) {
    bool some = false;
    if constexpr (!Pass::kHoldsQueries) {
      for (int head = 0; tile.band.q_len > 0 && head < params.group; ++head) {
        const int64_t list = list_of(params, tile, head);
        some |= load_constant(rows(params).pointers + list * (rows(params).rows + 1)) < 0;
      }
    }
    return some;
  }

  // The next head whose row names some block that is met, from `head` on.
  __device__ __forceinline__ bool open(const BackwardParams& params, const Tile& tile) {
    const SparseRows& all = rows(params);
    const int place = tile.first + (Pass::kHoldsQueries ? tile.band.offset : 0);
    const int row = place >> (Pass::kHoldsQueries ? params.q_shift : params.k_shift);
    if (row < 0 || row >= all.rows) return false;
    for (; head < met_heads<Pass::kSide>(params); ++head) {
      const int64_t list = list_of(params, tile, head);
      const int* const pointers = all.pointers + list * (all.rows + 1) + row;
      const int begin = load_constant(pointers), end = load_constant(pointers + 1);
      if (begin < 0 || end > all.pitch) continue;
      blocks_ = all.blocks + list * all.pitch;
      entry_ = begin, entries_end_ = end;
      skip_blocks();
      if (find_block()) return true;
    }
    return false;
  }
  // To the first entry that is not in front of what is met.
  __device__ __forceinline__ void skip_blocks() {
    const int first = begin_ >> met_shift_;
    for (int end = entries_end_; entry_ < end;) {
      const int middle = entry_ + (end - entry_) / 2;
      if (load_constant(blocks_ + middle) < first) {
        entry_ = middle + 1;
      } else {
        end = middle;
      }
    }
  }
  // The entry's tiles; false where the row ends, or goes beyond what is met.
  __device__ __forceinline__ bool find_block() {
    if (entry_ >= entries_end_) return false;
    const int block = load_constant(blocks_ + entry_);
    if (block < begin_ >> met_shift_ || block > (end_ - 1) >> met_shift_) return false;
    met_ = max(block << met_shift_, begin_);
    met_end_ = min((block + 1) << met_shift_, end_);
    return true;
  }
  __device__ __forceinline__ void look(const Tile& tile) {
    const int place = met_ * kMet, before = tile.band.offset;
    bool all;
    if constexpr (Pass::kHoldsQueries) {
      all = place + kMet - 1 <= max(tile.first, 0) + before;
    } else {
      all = place >= max(before, tile.first + tile.count - 1) && place + kMet <= tile.band.k_len;
    }
    seen = met_ * 2 + (all ? 1 : 0);
  }

  int begin_, end_;    // tiles that may be met
  int met_shift_;      // of tiles in a block
  const int* blocks_;  // of the head's list
  int entry_, entries_end_;
  int met_, met_end_;  // of the entry's block
};

}  // namespace pallas_attn::attention::sm90::backward::wide
