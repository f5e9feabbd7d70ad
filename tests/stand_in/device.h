// A grid of the device on the host: one fiber a thread, in one thread of the machine. What a kernel says in
// PTX is stood in for by the headers beside this one, found before those of csrc.
//
// Fibers change hands only where threads wait. Whose turn it is, and when a copy lands, is drawn from a fixed
// seed; a grid in which nobody can go on ends the process, as does an address that an instruction of the
// device would not take. What is not seen: accesses that nothing orders, and what is not yet visible to the
// asynchronous units.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __grid_constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __align__
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(multiple) __attribute__((aligned(multiple)))

using std::max;
using std::min;

namespace stand_in {

constexpr int kMostThreads = 1024, kWarps = kMostThreads / 32, kWarpgroups = kMostThreads / 128;
inline int threads = 384;  // of a CTA
constexpr size_t kSharedBytes = 232448;
inline char* shared;  // memory of the CTA whose turn it is

inline long events = 0;  // whatever may let a fiber go on
// Products as late as whoever waits for them allows: for kernels whose operands in registers live as long.
inline bool late_products = false;
inline std::mt19937 random(1);

[[noreturn]] inline void fail(const char* what, long number = 0) {
  std::fprintf(stderr, "stand-in: %s %ld\n", what, number);
  std::exit(1);
}

inline void expect_aligned(const char* what, uint64_t address, uint64_t multiple) {
  if (address % multiple) fail(what, static_cast<long>(address));
}

using Group = std::vector<std::function<void()>>;

struct Fiber;
void let_others_run();

// Threads that meet, once or again and again.
struct Meeting {
  int size = 0, arrived = 0, generation = 0;
  bool any = false, result = false;

  void arrive(bool flag = false) {
    any |= flag;
    if (++arrived < size) return;
    result = any;
    any = false;
    arrived = 0;
    ++generation, ++events;
  }
  bool wait(bool flag = false) {
    const int mine = generation;
    arrive(flag);
    while (generation == mine) let_others_run();
    return result;
  }
};

// By the copy engine, or by threads, who arrive behind theirs.
struct Copy {
  std::function<void()> land;
};

struct Cta {
  dim3 block;
  Meeting warp[kWarps], warpgroup[kWarpgroups], named[16];
  uint64_t exchanged[kWarps][32];
  uint32_t fragment[kWarpgroups][128][4];  // the A operand of a product
  std::vector<Copy> copies;
  std::vector<char> memory = std::vector<char>(kSharedBytes, '\xFF');
};

struct Fiber {
  ucontext_t start;  // from where it goes on as long as it has not begun
  jmp_buf place;
  std::vector<char> stack = std::vector<char>(48 << 10);
  int thread;
  std::vector<Group> copies = std::vector<Group>(1);    // by itself, that have begun
  int reading = 0, writing = 0;                         // by the copy engine, out of shared memory
  std::vector<Group> products = std::vector<Group>(1);  // that are not done; the last group is open
  uint32_t committed = 0;                               // groups
  Cta* cta;
  bool begun = false, done = false;
};

inline jmp_buf scheduler;
inline Fiber* self = nullptr;
inline Meeting grid;
inline dim3 grid_size;
inline std::function<void()> kernel;

// By jumps: swapcontext would ask the kernel for the signals to block, which takes longer than all else here.
inline void let_others_run() {
  if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}
inline void let_run(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}
inline Cta& cta() { return *self->cta; }
inline int lane() { return self->thread % 32; }
inline int warp() { return self->thread / 32; }

template <typename T>
T exchange(T v, int from) {
  static_assert(sizeof(T) <= 8);
  uint64_t (&words)[32] = cta().exchanged[warp()];
  std::memcpy(&words[lane()], &v, sizeof(T));
  cta().warp[warp()].wait();
  T other;
  std::memcpy(&other, &words[from], sizeof(T));
  cta().warp[warp()].wait();
  return other;
}

// An mbarrier's 64 bits.
struct Barrier {
  uint8_t phase, expected, pending, unused;
  int32_t bytes;

  void settle() {
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = expected;
    ++events;
  }
  void arrive(int coming_bytes = 0) {
    if (pending == 0) fail("more arrivals at an mbarrier than it expects");
    bytes += coming_bytes;
    --pending;
    settle();
  }
};
inline Barrier& barrier_at(uint64_t* address) {
  expect_aligned("an mbarrier at", reinterpret_cast<uint64_t>(address), 8);
  return *reinterpret_cast<Barrier*>(address);
}

inline void land(const Copy& copy) {
  copy.land();
  ++events;
}
// At once, or some time later.
inline void begin(Copy copy) {
  if (random() % 2) {
    land(copy);
  } else {
    cta().copies.push_back(std::move(copy));
  }
}
inline void count_landed(uint64_t* at, uint32_t bytes) {
  Barrier& barrier = barrier_at(at);
  barrier.bytes -= static_cast<int>(bytes);
  barrier.settle();
}
inline void land_some(Cta& cta, bool all) {
  for (size_t i = 0; i < cta.copies.size();) {
    if (!all && random() % 3 != 0) {
      ++i;
      continue;
    }
    const Copy copy = std::move(cta.copies[i]);
    cta.copies.erase(cta.copies.begin() + static_cast<long>(i));
    land(copy);  // may begin another one
  }
}

inline void start_fiber() {
  kernel();
  self->done = true;
  ++events;
  let_others_run();
}

// Runs `body` in every thread of the grid; `waiting` threads of each CTA meet the others of the grid.
inline void run_grid(dim3 size, int waiting, std::function<void()> body) {
  const int num_ctas = static_cast<int>(size.x * size.y * size.z);
  kernel = std::move(body);
  grid_size = size;
  grid = {};
  grid.size = num_ctas * waiting;
  std::vector<Cta> ctas(num_ctas);
  std::vector<std::vector<Fiber>> fibers(num_ctas);
  for (int i = 0; i < num_ctas; ++i) {
    Cta& cta = ctas[i];
    cta.block = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
    for (Meeting& warp : cta.warp) warp.size = 32;
    for (Meeting& warpgroup : cta.warpgroup) warpgroup.size = 128;
    fibers[i] = std::vector<Fiber>(threads);
    for (int thread = 0; thread < threads; ++thread) {
      Fiber& fiber = fibers[i][thread];
      fiber.thread = thread;
      fiber.cta = &cta;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.data();
      fiber.start.uc_stack.ss_size = fiber.stack.size();
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, start_fiber, 0);
    }
  }
  int alive = num_ctas * threads, idle = 0;
  for (int turn = 0; alive > 0; turn = (turn + 1) % num_ctas) {
    Cta& cta = ctas[turn];
    std::memcpy(shared, cta.memory.data(), kSharedBytes);
    const long before_turn = events;
    for (int stuck = 0; stuck < 3;) {
      const long before = events;
      const int first = static_cast<int>(random() % (threads / 32)) * 32;
      for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[turn][(first + i) % threads];
        if (fiber.done) continue;
        let_run(fiber);
        alive -= fiber.done;
        if (i % 32 == 31) land_some(cta, false);
      }
      stuck = events == before ? stuck + 1 : 0;
      if (stuck > 0) land_some(cta, true);
    }
    std::memcpy(cta.memory.data(), shared, kSharedBytes);
    idle = events == before_turn ? idle + 1 : 0;
    if (idle > num_ctas + 2) fail("all wait; threads left:", alive);
  }
}

}  // namespace stand_in

struct ThreadIndex {
  struct {
    operator int() const { return stand_in::self->thread; }
  } x;
};
inline ThreadIndex threadIdx;
#define blockIdx (stand_in::cta().block)
#define gridDim (stand_in::grid_size)

template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return stand_in::exchange(v, from % 32);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int distance) {
  return stand_in::exchange(v, stand_in::lane() ^ distance);
}
inline int __shfl_up_sync(unsigned, int v, int distance) {
  const int own = stand_in::lane();
  return stand_in::exchange(v, own >= distance ? own - distance : own);
}
inline unsigned __ballot_sync(unsigned, bool flag) {
  unsigned lanes = 0;
  for (int i = 0; i < 32; ++i) lanes |= stand_in::exchange(static_cast<uint32_t>(flag), i) << i;
  return lanes;
}
inline int __any_sync(unsigned lanes, int flag) { return __ballot_sync(lanes, flag != 0) != 0; }
inline int __all_sync(unsigned lanes, int flag) { return __ballot_sync(lanes, flag == 0) == 0; }
template <typename Op>
int reduce(int v, Op op) {
  int all = stand_in::exchange(v, 0);
  for (int i = 1; i < 32; ++i) all = op(all, stand_in::exchange(v, i));
  return all;
}
inline int __reduce_add_sync(unsigned, int v) {
  return reduce(v, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int v) {
  return reduce(v, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(unsigned, int v) {
  return reduce(v, [](int a, int b) { return max(a, b); });
}
inline void __syncwarp() { stand_in::cta().warp[stand_in::warp()].wait(); }
inline void __syncthreads() {
  stand_in::cta().named[0].size = stand_in::threads;
  stand_in::cta().named[0].wait();
}
inline int __syncthreads_or(int flag) {
  stand_in::cta().named[0].size = stand_in::threads;
  return stand_in::cta().named[0].wait(flag != 0);
}
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
template <typename T>
T __ldg(const T* from) {
  stand_in::expect_aligned("a load of", reinterpret_cast<uint64_t>(from), sizeof(T));
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return __ldg(from);
}
inline int atomicAdd(int* to, int v) {
  const int before = *to;
  *to += v;
  return before;
}
inline int atomicCAS(int* to, int from, int v) {
  const int before = *to;
  if (before == from) *to = v;
  return before;
}
inline int atomicMax(int* to, int v) {
  const int before = *to;
  *to = v > before ? v : before;
  return before;
}
inline int atomicMin(int* to, int v) {
  const int before = *to;
  *to = min(before, v);
  return before;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(uint32_t x) {
  float v;
  std::memcpy(&v, &x, 4);
  return v;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t v;
  std::memcpy(&v, &x, 4);
  return v;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = low | uint64_t{high} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
