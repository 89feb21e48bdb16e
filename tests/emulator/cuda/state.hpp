// The state of an emulated thread block that kernels touch: threads, warps and barriers. What only
// the scheduler touches is in scheduler.hpp. Every kernel is compiled with this file, so it
// includes little: the standard library's containers would take most of the time.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

// Without the special functions of C++17, which nothing here calls.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#include <cmath>

using std::fma;
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}

namespace emulated {

constexpr int kWarp = 32;

struct Barrier {
  unsigned arrived = 0;
  unsigned expected = 0;  // the count with which threads have arrived
  unsigned generation = 0;
  int any[2] = {0, 0};  // of this generation and the next
};

// A barrier that counts arrivals and bytes; `phase` is the parity of the phase it is in.
struct PhaseBarrier {
  unsigned arrivals;  // of each phase
  unsigned missing;   // arrivals that this phase lacks
  long long bytes = 0;
  unsigned phase = 0;
};

struct Index {
  unsigned x;
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

// A function without arguments, with the values that it captures.
class Work {
 public:
  template <class Function>
  Work(const Function& function)
      : run_([](const void* held) { (*static_cast<const Function*>(held))(); }) {
    static_assert(__is_trivially_copyable(Function) && sizeof(Function) <= sizeof held_);
    std::memcpy(held_, &function, sizeof function);
  }
  Work(const Work&) = default;
  Work& operator=(const Work&) = default;
  void operator()() const { run_(held_); }

 private:
  void (*run_)(const void*);
  alignas(16) unsigned char held_[192];
};

struct Thread {
  Index index{0};
  const Barrier* waiting = nullptr;
  unsigned generation = 0;
  const PhaseBarrier* phases = nullptr;  // the thread waits there for the end of `phase`
  unsigned phase = 0;
  bool done = false;
  bool paused = false;   // until all warps have had their turn
  bool ordered = false;  // whether a fence precedes the next product
  bool cleared = false;  // the copy engine stored to device memory, and no fence has followed

  bool runnable() const {
    return !done && !paused && (waiting == nullptr || waiting->generation != generation) &&
           (phases == nullptr || phases->phase != phase);
  }
};

// The numbers that the lanes of a warp exchange.
struct Warp {
  Barrier barrier;
  std::uint64_t word[kWarp];
  double left[kWarp][8];
  double right[kWarp][4];
  const int* turn = nullptr;  // the warp's turn in an ordered accumulation
};

struct Block {
  Warp* warps;
  unsigned threads;
  Barrier barrier;
  Barrier named[16];
  std::uint16_t* writers;  // see proxies.hpp
};

inline Block* block = nullptr;
inline Thread* current = nullptr;
inline Index block_index{0};
inline Index grid_size{0};
inline unsigned launches = 0;  // launches of this kernel before this one
inline Index block_size{0};
inline unsigned char* shared_base = nullptr;
inline std::size_t shared_size = 0;
inline bool turns = false;  // whether warps of this launch take turns at an ordered accumulation

// A range of memory, and the number of its bytes that copies to shared memory have read.
struct Watch {
  std::uint64_t begin;
  std::uint64_t end;
  std::uint64_t bytes;
};
inline Watch* watches = nullptr;
inline int watch_count = 0;

inline void reads(const void* from, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(from);
  for (int i = 0; i < watch_count; ++i) {
    if (at >= watches[i].begin && at < watches[i].end) watches[i].bytes += bytes;
  }
}

// Properties that are right in some kernels and errors in others.
struct Habits {
  bool roles;        // turns are kept by other threads than those that add
  bool passes_last;  // no thread waits for the last turn at a named barrier
  bool any_order;    // no block waits for another one
};
inline Habits habits{false, false, false};
inline bool last_first = false;  // blocks run from the last one on, where any order is right

}  // namespace emulated
