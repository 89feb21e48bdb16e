// The state of an emulated thread block: threads, warps, barriers and work under way.
#pragma once

#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

using std::fma;
using std::max;
using std::min;

namespace emulated {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 256 * 1024;

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

using Work = std::function<void()>;

// Groups of work. Groups are done in order, at the latest when they are waited for.
struct Groups {
  std::vector<Work> open;
  std::deque<std::vector<Work>> closed;

  void commit() {
    closed.push_back(std::move(open));
    open.clear();
  }
  void retire(std::size_t pending) {
    while (closed.size() > pending) {
      for (const Work& work : closed.front()) work();
      closed.pop_front();
    }
  }
  bool empty() const { return open.empty() && closed.empty(); }
};

// The accumulators of products under way, with the values that they must keep until these are done.
struct Sums {
  std::vector<float> value;
  int products = 0;
};

struct Fiber {
  ucontext_t begin;
  std::jmp_buf place;  // where it stopped
  bool begun = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Index index{0};
  const Barrier* waiting = nullptr;
  unsigned generation = 0;
  const PhaseBarrier* phases = nullptr;  // the fiber waits there for the end of `phase`
  unsigned phase = 0;
  bool done = false;
  bool paused = false;  // until all warps have had their turn
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  Groups products;
  std::map<const float*, Sums> sums;  // of products that are under way
  std::uint64_t asked = 0;            // digest of all products so far
  bool ordered = false;               // whether a fence precedes the next product
  Groups stores;
  bool cleared = false;  // the copy engine stored to device memory, and no fence has followed
  std::vector<unsigned> unfenced;  // see proxies.hpp

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
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  std::map<unsigned, PhaseBarrier> phases;  // by their address
  std::deque<Work> copies;                  // the copy engine's pending copies
  std::vector<std::uint16_t> writers;       // see proxies.hpp
};

inline Block* block = nullptr;
inline Fiber* current = nullptr;
inline std::jmp_buf scheduler;
inline const std::function<void()>* kernel = nullptr;
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
