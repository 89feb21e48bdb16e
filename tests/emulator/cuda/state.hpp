// What a thread block that is emulated consists of: threads, warps, barriers, work that is under
// way.
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
  unsigned expected = 0;  // by those that have arrived
  unsigned generation = 0;
  int any[2] = {0, 0};  // of this generation and the next
};

// A barrier that counts arrivals and bytes; `phase` is the parity of the phase it is in.
struct PhaseBarrier {
  unsigned arrivals;  // of a phase
  unsigned missing;   // of this one
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

// What is done in order, in groups, some time before it is waited for.
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

// What a product under way adds to, as it has to be when it is done.
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
  const PhaseBarrier* phases = nullptr;  // waits there for the end of `phase`
  unsigned phase = 0;
  bool done = false;
  bool paused = false;  // until all warps have had their turn
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
  Groups products;
  std::map<const float*, Sums> sums;  // of products that are under way
  std::uint64_t asked = 0;            // digest of all products so far
  bool ordered = false;               // its registers before the next product
  Groups stores;
  bool cleared = false;  // device memory by the copy engine, which nothing has ordered yet
  std::vector<unsigned> unfenced;  // see proxies.hpp

  bool runnable() const {
    return !done && !paused && (waiting == nullptr || waiting->generation != generation) &&
           (phases == nullptr || phases->phase != phase);
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
  std::map<unsigned, PhaseBarrier> phases;  // by their address
  std::deque<Work> copies;                  // that the copy engine has been asked for
  std::vector<std::uint16_t> writers;       // see proxies.hpp
};

inline Block* block = nullptr;
inline Fiber* current = nullptr;
inline std::jmp_buf scheduler;
inline const std::function<void()>* kernel = nullptr;
inline Index block_index{0};
inline Index grid_size{0};
inline unsigned launches = 0;  // of this kernel before this one
inline Index block_size{0};
inline unsigned char* shared_base = nullptr;
inline std::size_t shared_size = 0;
inline bool turns = false;  // whether this launch takes turns at an ordered accumulation

// Ranges of memory, and how many of their bytes copies to shared memory have read.
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

// What is right in one kernel and wrong in another.
struct Habits {
  bool roles;        // turns are kept by other threads than those that add
  bool passes_last;  // the last who passes a turn at a named barrier passes it to nobody
  bool any_order;    // no block waits for another one
};
inline Habits habits{false, false, false};
inline bool last_first = false;  // blocks that may come in any order begin with the last

}  // namespace emulated
