// Runs a thread block of CUDA code on the CPU: every thread is a fiber, and collectives and
// barriers are where fibers change. Copies that cp.async starts are done when they are waited for
// and not before, and warps run as far as they can, one after the other, so that a missing wait or
// barrier shows. A wrong address in shared memory aborts, and so does a barrier that cannot open,
// that is met with different numbers of threads, or that a block leaves half full.
#pragma once

#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using std::fma;
using std::max;
using std::min;

namespace emulated {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 256 * 1024;

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;  // by those that have arrived
  unsigned generation = 0;
  int any[2] = {0, 0};  // of this generation and the next
};

struct Index {
  unsigned x;
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Index index{0};
  const Barrier* waiting = nullptr;
  unsigned generation = 0;
  bool done = false;
  bool paused = false;  // until all warps have had their turn
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;

  bool runnable() const {
    return !done && !paused && (waiting == nullptr || waiting->generation != generation);
  }
};

// What the lanes of a warp hand each other.
struct Warp {
  Barrier barrier;
  std::uint64_t word[kWarp];
  double left[kWarp][8];
  double right[kWarp][4];
  const int* turn = nullptr;  // that it has, of an ordered accumulation
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
};

inline Block* block = nullptr;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline const std::function<void()>* kernel = nullptr;
inline Index block_index{0};
inline Index grid_size{0};
inline unsigned char* shared_base = nullptr;
inline std::size_t shared_size = 0;
inline bool turns = false;  // whether this launch takes turns at an ordered accumulation

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated block %u thread %u: %s\n", block_index.x,
               current ? current->index.x : 0u, what);
  std::abort();
}

inline int lane() { return static_cast<int>(current->index.x) % kWarp; }
inline Warp& warp() { return block->warps[current->index.x / kWarp]; }

// Whether this was the last of `count`.
inline bool arrive(Barrier& barrier, unsigned count) {
  if (count == 0 || count % kWarp != 0) fail("a barrier of parts of warps");
  if (barrier.arrived == 0) barrier.expected = count;
  if (barrier.expected != count) fail("a barrier that is met with different numbers of threads");
  if (++barrier.arrived < count) return false;
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.any[barrier.generation % 2] = 0;
  return true;
}

inline void wait(Barrier& barrier, unsigned count) {
  if (arrive(barrier, count)) return;
  current->waiting = &barrier;
  current->generation = barrier.generation;
  swapcontext(&current->context, &scheduler);
  current->waiting = nullptr;
}

// Lets the other warps go ahead; in half of the blocks.
inline void pause() {
  if (block_index.x / 2 % 2 != 0) return;
  current->paused = true;
  swapcontext(&current->context, &scheduler);
}

inline void sync_warp() { wait(warp().barrier, kWarp); }

template <class T>
T exchange(T value, int from_lane) {
  static_assert(sizeof(T) <= 8);
  Warp& w = warp();
  std::memcpy(&w.word[lane()], &value, sizeof value);
  sync_warp();
  T result;
  std::memcpy(&result, &w.word[from_lane], sizeof result);
  sync_warp();
  return result;
}

inline void finish_group(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    if (copy.valid) {
      std::memcpy(copy.to, copy.from, 16);
    } else {
      std::memset(copy.to, 0, 16);
    }
  }
}

inline unsigned char* shared_at(unsigned address, unsigned bytes) {
  if (address % bytes != 0 || address + bytes > shared_size)
    fail("address outside of shared memory");
  return shared_base + address;
}

inline void run_fiber() {
  (*kernel)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

// Lets the fibers of a warp run until none of them can; says whether any did.
inline bool run_warp(int first) {
  bool progress = false, again = true;
  while (again) {
    again = false;
    for (int i = first; i < first + kWarp; ++i) {
      Fiber& fiber = block->fibers[i];
      if (!fiber.runnable()) continue;
      current = &fiber;
      swapcontext(&scheduler, &fiber.context);
      progress = again = true;
    }
  }
  return progress;
}

// One block; `order` says which warps run first.
inline void run_block(int threads, unsigned order) {
  Block mine;
  mine.fibers = std::vector<Fiber>(threads);
  mine.warps = std::vector<Warp>(threads / kWarp);
  block = &mine;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = mine.fibers[i];
    fiber.index.x = i;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  std::memset(shared_base, 0xff, shared_size);  // NaN in every type
  const int warps = threads / kWarp;
  bool progress = true;
  while (progress) {
    progress = false;
    for (int i = 0; i < warps; ++i) {
      const int which = order % 2 ? warps - 1 - i : i;
      progress |= run_warp(which * kWarp);
    }
    for (Fiber& fiber : mine.fibers) {
      progress |= fiber.paused;
      fiber.paused = false;
    }
  }
  for (const Fiber& fiber : mine.fibers) {
    if (!fiber.done) fail("a barrier that some threads never reach");
  }
  for (const Barrier& barrier : mine.named) {
    if (barrier.arrived != 0) fail("a named barrier that is left half full");
  }
  for (const Warp& warp : mine.warps) {
    if (turns && warp.turn != nullptr) fail("a turn that is not passed");
  }
}

inline void launch(int grid, int threads, std::size_t shared_bytes, unsigned char* shared,
                   const std::function<void()>& entry) {
  _mm_setcsr(_mm_getcsr() | 0x8040);  // subnormal numbers are flushed, as with -ftz=true
  kernel = &entry;
  turns = false;
  shared_base = shared;
  shared_size = shared_bytes;
  grid_size.x = grid;
  for (int i = 0; i < grid; ++i) {
    block_index.x = i;
    run_block(threads, i);
  }
  _mm_setcsr(_mm_getcsr() & ~0x8040u);
}

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid_size)

inline void __syncthreads() {
  emulated::wait(emulated::block->barrier, emulated::block->fibers.size());
}
inline int __syncthreads_or(int value) {
  emulated::Barrier& barrier = emulated::block->barrier;
  int& any = barrier.any[barrier.generation % 2];  // kept until the next barrier has opened
  any |= value;
  emulated::wait(barrier, emulated::block->fibers.size());
  return any;
}
inline void __syncwarp() { emulated::sync_warp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::exchange(value, emulated::lane() ^ mask);
}
inline int __any_sync(unsigned mask, int value);
inline int __all_sync(unsigned mask, int value) { return !__any_sync(mask, !value); }
inline int __any_sync(unsigned, int value) {
  int any = 0;
  for (int from = 0; from < emulated::kWarp; ++from) any |= emulated::exchange(value, from);
  return any;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
