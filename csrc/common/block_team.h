// The threads of one block as a team that shares work: every call is one step of all of them together, and
// what a step wrote is there for the next one.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

namespace pallas_attn {

// kOnce: never are more workers asked for than there are threads.
template <int kThreads, bool kOnce>
class BlockTeam {
 public:
  struct Totals {
    int sum, least, most;
  };
  struct Scratch {
    Totals by_warp[kThreads / 32];
  };

  __device__ explicit BlockTeam(Scratch& scratch) : scratch_(scratch) {}

  template <typename Work>
  __device__ void each(int count, Work work) const {
    each_at_last(count, work);
    __syncthreads();
  }
  // A step behind which there is none.
  template <typename Work>
  __device__ void each_at_last(int count, Work work) const {
    if constexpr (kOnce) {
      if (static_cast<int>(threadIdx.x) < count) work(threadIdx.x);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += kThreads) work(i);
    }
  }

  // Within a step, by any number of workers.
  static __device__ void lower(int& value, int to) { atomicMin(&value, to); }

  // sums[i] becomes the sum of the first i values. It is there for work(i) of the next step, not for other
  // work.
  template <typename Value>
  __device__ Totals prefix_sum(int count, Value value, int* sums) const {
    Totals all = {0, INT_MAX, INT_MIN};
#pragma unroll 1
    for (int base = 0; base == 0 || (!kOnce && base < count); base += kThreads) {
      const int i = base + threadIdx.x;
      const int own = i < count ? value(i) : 0;
      int sum = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, sum, distance);
        if (lane() >= distance) sum += below;
      }
      const int least = __reduce_min_sync(~0u, i < count ? own : INT_MAX);
      const int most = __reduce_max_sync(~0u, i < count ? own : INT_MIN);
      // Everybody has read the round before, or the sum before this one.
      if constexpr (!kOnce) __syncthreads();
      if (lane() == 31) scratch_.by_warp[warp()] = {sum, least, most};
      __syncthreads();
      const Totals none = {0, INT_MAX, INT_MIN};
      const Totals of_warp = lane() < kWarps ? scratch_.by_warp[lane()] : none;
      const int of_warps_below = __reduce_add_sync(~0u, lane() < warp() ? of_warp.sum : 0);
      if (i < count) sums[i] = all.sum + of_warps_below + sum - own;
      all.sum += __reduce_add_sync(~0u, of_warp.sum);
      all.least = min(all.least, __reduce_min_sync(~0u, of_warp.least));
      all.most = max(all.most, __reduce_max_sync(~0u, of_warp.most));
    }
    return all;
  }

  // `hop(i)` leads from i to a later one below `count`, or to the end, which is `count`. Of each i below
  // `count`: the way out of its chunk of 32 neighbours, and which of them lie on it.
  template <typename HopOf, typename Store>
  __device__ void follow_in_chunks(int count, HopOf hop_of, Store store) const {
#pragma unroll 1
    for (int first = 32 * warp(); first < count; first += kThreads) {
      const int i = first + lane(), end = min(first + 32, count);
      auto hop = hop_of(min(i, count - 1));
      uint32_t visited = 1u << lane();
#pragma unroll
      for (int hops = 1; hops < 32; hops *= 2) {
        // What has been followed so far, and what has been followed from there: twice as far. Of a lane's
        // number only the last five bits count, which are the request's.
        const bool inside = hop.request() < end;
        const decltype(hop) on = {__shfl_sync(~0u, hop.word, hop.word)};
        const uint32_t visits = __shfl_sync(~0u, visited, hop.word);
        if (inside) {
          hop = hop.then(on);
          visited |= visits;
        }
      }
      // Those past the end have read what the last one's place holds.
      __syncwarp();
      if (i < count) store(i, hop, visited);
    }
    __syncthreads();
  }

 private:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32, "one warp adds up what the warps found");

  static __device__ int lane() { return threadIdx.x % 32; }
  static __device__ int warp() { return threadIdx.x / 32; }

  Scratch& scratch_;
};

}  // namespace pallas_attn
