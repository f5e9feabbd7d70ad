// Where the pages of a request lie in the pool.
#pragma once

#include <cstdint>

#include "mla/params.h"

namespace pallas_attn::mla::sm90 {

// A request's row of the block table, read 32 entries at a time in the lanes of a warp, the next 32 already
// on their way; entries past the run's end are fetched (within the row) but never asked for. For one whole
// warp.
class PageTable {
 public:
  // Tokens of a request as given, and the most its pages can hold.
  static __device__ __forceinline__ int length(const DecodeParams& params, int request) {
    return __ldg(params.seq_lens + request);
  }
  static __device__ __forceinline__ int64_t capacity(const DecodeParams& params) {
    return static_cast<int64_t>(params.max_blocks) * kPageTokens;
  }

  __device__ PageTable(const DecodeParams& params, int lane) : params_(params), lane_(lane) {}

  // A run of a request that begins with page `begin`.
  __device__ __forceinline__ void open(int request, int begin) {
    row_ = params_.block_tables + static_cast<int64_t>(request) * params_.max_blocks + lane_;
    base_ = begin;
    current_ = fetch(begin);
    next_ = fetch(begin + 32);
  }

  // Page `index` of the request's; call with `index` rising by one.
  __device__ __forceinline__ int page(int index) {
    if (index == base_ + 32) {
      base_ = index;
      current_ = next_;
      next_ = fetch(base_ + 32);
    }
    return __shfl_sync(0xffffffff, current_, index - base_);
  }

  __device__ __forceinline__ bool exists(int page) const { return page >= 0 && page < params_.num_pages; }

 private:
  __device__ int fetch(int base) const { return base < params_.max_blocks - lane_ ? __ldg(row_ + base) : 0; }

  const DecodeParams& params_;
  const int lane_;
  const int* row_;
  int base_, current_, next_;
};

}  // namespace pallas_attn::mla::sm90
