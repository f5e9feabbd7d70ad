// Stands in for CUDA's header where device code of one block is run on the host, a thread for each of the
// block's: what such code uses, by barriers and memory that the threads share.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define __device__

namespace cuda_on_host {

class Meeting {
 public:
  explicit Meeting(int threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Meeting() { pthread_barrier_destroy(&barrier_); }
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

struct Warp {
  Meeting meeting{32};
  uint32_t words[32];
};

struct Index {
  int x;
};
inline thread_local Index thread;
inline thread_local Meeting* block;
inline thread_local Warp* warp;

// Runs work() by so many threads.
template <typename Work>
void run_block(int threads, Work work) {
  Meeting meeting(threads);
  std::vector<Warp> warps(threads / 32);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      thread.x = i;
      block = &meeting;
      warp = &warps[i / 32];
      work();
    });
  }
  for (std::thread& one : running) one.join();
}

// What `read` makes of the words of all lanes.
template <typename Read>
auto exchanged(uint32_t word, Read read) {
  warp->words[thread.x % 32] = word;
  warp->meeting.wait();
  const auto result = read(warp->words);
  warp->meeting.wait();
  return result;
}

template <typename Op>
int reduced(int value, Op op) {
  return exchanged(value, [&](const uint32_t* words) {
    int all = words[0];
    for (int lane = 1; lane < 32; ++lane) all = op(all, static_cast<int>(words[lane]));
    return all;
  });
}

}  // namespace cuda_on_host

#define threadIdx cuda_on_host::thread

using std::max;
using std::min;

inline void __syncthreads() { cuda_on_host::block->wait(); }
inline uint32_t __shfl_sync(unsigned, uint32_t word, int lane) {
  return cuda_on_host::exchanged(word, [=](const uint32_t* words) { return words[lane % 32]; });
}
inline void __syncwarp() { __shfl_sync(~0u, 0, 0); }
inline int __shfl_up_sync(unsigned, int value, int distance) {
  const int own = threadIdx.x % 32, from = own >= distance ? own - distance : own;
  return __shfl_sync(~0u, value, from);
}
inline int __reduce_add_sync(unsigned, int value) {
  return cuda_on_host::reduced(value, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int value) {
  return cuda_on_host::reduced(value, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(unsigned, int value) {
  return cuda_on_host::reduced(value, [](int a, int b) { return max(a, b); });
}
inline int atomicMin(int* at, int value) {
  int before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < before &&
         !__atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
