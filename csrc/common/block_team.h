// The threads of one block as a team that shares work: every call is one step of all of them together, and
// what a step wrote is there for the next one.
#pragma once

#include <cuda_runtime.h>

#include <climits>

namespace pallas_attn {

// A power of two of neighbouring lanes that look for something together.
class LaneGroup {
 public:
  __device__ explicit LaneGroup(int width)
      : width_(width),
        lane_(threadIdx.x % width),
        first_(threadIdx.x % 32 - lane_),
        mask_((width == 32 ? ~0u : (1u << width) - 1) << first_) {}

  __device__ bool leads() const { return lane_ == 0; }

  // The first i in [begin, end) for which `holds` is true, else end.
  template <typename Holds>
  __device__ int first(int begin, int end, Holds holds) const {
    for (int base = begin; base < end; base += width_) {
      const int i = base + lane_;
      const unsigned lanes = __ballot_sync(mask_, i < end && holds(i));
      if (lanes != 0) return base + __ffs(lanes) - 1 - first_;
    }
    return end;
  }

 private:
  const int width_, lane_, first_;
  const unsigned mask_;
};

template <int kThreads>
class BlockTeam {
 public:
  struct Scratch {
    int by_warp[kThreads / 32];
  };

  __device__ explicit BlockTeam(Scratch& scratch) : scratch_(scratch) {}

  template <typename Work>
  __device__ void each(int count, Work work) const {
    for (int i = threadIdx.x; i < count; i += kThreads) work(i);
    __syncthreads();
  }

  // As many threads for each as there are.
  template <typename Work>
  __device__ void each_by_group(int count, Work work) const {
    int width = 32;
    while (width > 1 && count > kThreads / width) width /= 2;
    const LaneGroup group(width);
    for (int i = threadIdx.x / width; i < count; i += kThreads / width) work(group, i);
    __syncthreads();
  }

  // values[i] becomes the sum of the first i, for i up to and including `count`.
  __device__ void prefix_sum(int* values, int count) {
    int before = 0;
    for (int base = 0; base < count; base += kThreads) {
      const int i = base + threadIdx.x;
      const int value = i < count ? values[i] : 0;
      int sum = value;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, sum, distance);
        if (lane() >= distance) sum += below;
      }
      if (lane() == 31) scratch_.by_warp[warp()] = sum;
      __syncthreads();
      int warps = lane() < kWarps ? scratch_.by_warp[lane()] : 0;
      int below = __reduce_add_sync(~0u, lane() < warp() ? warps : 0);
      const int all = __reduce_add_sync(~0u, warps);
      if (i < count) values[i] = before + below + sum - value;
      before += all;
      __syncthreads();  // the next round overwrites the warps' sums
    }
    if (threadIdx.x == 0) values[count] = before;
    __syncthreads();
  }

  template <typename Value>
  __device__ int max(int count, Value value) {
    int most = INT_MIN;
    for (int i = threadIdx.x; i < count; i += kThreads) most = ::max(most, value(i));
    most = __reduce_max_sync(~0u, most);
    if (lane() == 0) scratch_.by_warp[warp()] = most;
    __syncthreads();
    most = __reduce_max_sync(~0u, lane() < kWarps ? scratch_.by_warp[lane()] : INT_MIN);
    __syncthreads();
    return most;
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32, "one warp adds up what the warps found");

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }

  Scratch& scratch_;
};

}  // namespace pallas_attn
