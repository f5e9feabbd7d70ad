// The threads of one block as a team that shares work: every call is one step of all of them together, and
// what a step wrote is there for the next one.
#pragma once

#include <cuda_runtime.h>

#include <climits>

namespace pallas_attn {

// A warp that looks for something together.
class WarpSearch {
 public:
  __device__ bool leads() const { return threadIdx.x % 32 == 0; }

  // The first i in [begin, end) for which `holds` is true, else end.
  template <typename Holds>
  __device__ int first(int begin, int end, Holds holds) const {
#pragma unroll 1
    for (int base = begin; base < end; base += 32) {
      const int i = base + threadIdx.x % 32;
      const unsigned lanes = __ballot_sync(~0u, i < end && holds(i));
      if (lanes != 0) return base + __ffs(lanes) - 1;
    }
    return end;
  }
};

template <int kThreads>
class BlockTeam {
 public:
  struct Scratch {
    int by_warp[2][kThreads / 32];
  };

  __device__ explicit BlockTeam(Scratch& scratch) : scratch_(scratch) {}

  template <typename Work>
  __device__ void each(int count, Work work) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) work(i);
    __syncthreads();
  }

  // By a warp for each.
  template <typename Work>
  __device__ void each_by_group(int count, Work work) const {
#pragma unroll 1
    for (int i = warp(); i < count; i += kWarps) work(WarpSearch(), i);
    __syncthreads();
  }

  // sums[i] becomes the sum of the first i values, for i up to and including `count`.
  template <typename Value>
  __device__ void prefix_sum(int count, Value value, int* sums) const {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base <= count; base += kThreads) {
      const int i = base + threadIdx.x;
      const int own = i < count ? value(i) : 0;
      int sum = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, sum, distance);
        if (lane() >= distance) sum += below;
      }
      if (lane() == 31) scratch_.by_warp[0][warp()] = sum;
      __syncthreads();
      const int of_warp = lane() < kWarps ? scratch_.by_warp[0][lane()] : 0;
      const int of_warps_below = __reduce_add_sync(~0u, lane() < warp() ? of_warp : 0);
      if (i <= count) sums[i] = before + of_warps_below + sum - own;
      before += __reduce_add_sync(~0u, of_warp);
      __syncthreads();  // the next round overwrites the warps' sums
    }
  }

  struct Extremes {
    int least, most;
  };
  template <typename Value>
  __device__ Extremes extremes(int count, Value value) const {
    int least = INT_MAX, most = INT_MIN;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      least = min(least, value(i));
      most = max(most, value(i));
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (lane() == 0) {
      scratch_.by_warp[0][warp()] = least;
      scratch_.by_warp[1][warp()] = most;
    }
    __syncthreads();
    const int other = lane() < kWarps ? lane() : 0;
    const Extremes found = {__reduce_min_sync(~0u, scratch_.by_warp[0][other]),
                            __reduce_max_sync(~0u, scratch_.by_warp[1][other])};
    __syncthreads();
    return found;
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32, "one warp adds up what the warps found");

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }

  Scratch& scratch_;
};

}  // namespace pallas_attn
