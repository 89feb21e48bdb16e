// Runs a thread block of CUDA code on the CPU. Every thread is a fiber; fibers switch at
// collectives and barriers. Warps run one after the other, each as far as it can, so that a missing
// wait or barrier shows. Asynchronous work (copies, products of a warpgroup) is done at once or at
// the last moment that the waits allow; warps, blocks and barriers alternate between the two. The
// emulator aborts at a wrong address in shared memory, at a barrier that never opens, at a barrier
// that threads meet with different counts, and at one that a block leaves half full.
//
// This file is compiled once, to a library that the kernels call.
#pragma once

#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <csetjmp>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "proxies.hpp"

namespace emulated {

constexpr std::size_t kStack = 256 * 1024;

const float* const floats_of_halves = [] {
  static float floats[1 << 16];
  for (unsigned i = 0; i < 1 << 16; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    _Float16 x;
    std::memcpy(&x, &bits, sizeof x);
    floats[i] = static_cast<float>(x);
  }
  return floats;
}();

// Groups of work. Groups are done in order, at the latest when they are waited for.
template <class Item>
struct Groups {
  std::vector<Item> open;
  std::deque<std::vector<Item>> closed;

  void close() {
    closed.push_back(std::move(open));
    open.clear();
  }
  void wait(std::size_t pending) {
    while (closed.size() > pending) {
      for (const Item& item : closed.front()) finish(item);
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

// A product that adds to `count` sums.
struct Product {
  Work work;
  const float* sums;
  unsigned count;
};

// A copy of the copy engine, whose bytes count on a barrier.
struct Arrival {
  Work work;
  PhaseBarrier* phases;
  unsigned bytes;
};

struct Fiber : Thread {
  ucontext_t begin;
  std::jmp_buf place;  // where it stopped
  bool begun = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Groups<Copy> copies;
  Groups<Product> products;
  Groups<Work> stores;
  std::map<const float*, Sums> sums;  // of products that are under way
  std::uint64_t asked = 0;            // digest of all products so far
  std::vector<unsigned> unfenced;     // see proxies.hpp
};

// A block, with what only the scheduler touches.
struct State : Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> of_warps;
  std::vector<std::uint16_t> of_writers;
  std::map<unsigned, PhaseBarrier> phases;  // by their address
  std::deque<Arrival> copies;               // those under way
};

static void finish(const Product& product);
static void finish(const Work& work);

static std::jmp_buf scheduler;
static const Work* kernel = nullptr;

static Fiber& fiber() { return static_cast<Fiber&>(*current); }
static State& state() { return static_cast<State&>(*block); }

void fail(const char* what) {
  std::fprintf(stderr, "emulated block %u thread %u: %s\n", block_index.x,
               current ? current->index.x : 0u, what);
  std::abort();
}

// Returns to the scheduler. It jumps, because swapcontext makes two system calls.
void stop() {
  if (_setjmp(fiber().place) == 0) _longjmp(scheduler, 1);
}

// Runs a fiber until it stops.
[[gnu::noinline]] static void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

void pause() {
  if (variant() / 2 % 2 != 0) return;
  current->paused = true;
  stop();
}

void begin_phases(unsigned address, unsigned arrivals) {
  std::memcpy(shared_at(address, 8), &kBarrierMark, 8);
  if (!state().phases.try_emplace(address, PhaseBarrier{arrivals, arrivals}).second) {
    fail("a barrier that is initialised twice");
  }
}

PhaseBarrier& phases_at(unsigned address) {
  const auto found = state().phases.find(address);
  if (found == state().phases.end()) fail("a barrier that was not initialised");
  if (std::memcmp(shared_base + address, &kBarrierMark, sizeof kBarrierMark) != 0) {
    fail("something was written where a barrier lies");
  }
  return found->second;
}

static void end_phase_if_complete(PhaseBarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.phase ^= 1;
}

void arrive(PhaseBarrier& barrier, unsigned bytes) {
  if (barrier.missing == 0) fail("an arrival too many at a barrier");
  barrier.bytes += bytes;
  --barrier.missing;
  end_phase_if_complete(barrier);
}

void wait(const PhaseBarrier& barrier, unsigned parity) {
  if (barrier.phase != parity) return;
  current->phases = &barrier;
  current->phase = parity;
  stop();
  current->phases = nullptr;
}

static void finish(const Arrival& copy) {
  copy.work();
  copy.phases->bytes -= copy.bytes;
  end_phase_if_complete(*copy.phases);
}

void copy_later(unsigned barrier, unsigned bytes, const Work& work) {
  const Arrival copy{work, &phases_at(barrier), bytes};
  if ((barrier / 8 + variant()) % 2 == 0) {
    finish(copy);
  } else {
    state().copies.push_back(copy);
  }
}

void finish(const Copy& copy) {
  if (copy.valid) {
    reads(copy.from, 16);
    std::memcpy(copy.to, copy.from, 16);
  } else {
    std::memset(copy.to, 0, 16);
  }
}
void copy_with_group(const Copy& copy) { fiber().copies.open.push_back(copy); }
void close_copies() { fiber().copies.close(); }
void wait_for_copies(unsigned pending) { fiber().copies.wait(pending); }

void note_product(unsigned long long what) {
  if (!current->ordered) fail("products without a fence before them");
  fiber().asked = (fiber().asked + what) * 0x9e3779b97f4a7c15ull;
}
void multiply_later(const float* first, unsigned count, const Work& work) {
  Sums& sums = fiber().sums[first];
  if (sums.products++ == 0) sums.value.assign(first, first + count);
  fiber().products.open.push_back({work, first, count});
}
static void finish(const Product& product) {
  const auto& [work, first, count] = product;
  Sums& sums = fiber().sums[first];
  if (std::memcmp(first, sums.value.data(), sizeof(float) * count) != 0) {
    fail("sums that change while a product adds to them");
  }
  work();
  sums.value.assign(first, first + count);
  if (--sums.products == 0) fiber().sums.erase(first);
}
void close_products() { fiber().products.close(); }
void wait_for_products(unsigned pending) { fiber().products.wait(pending); }

static void finish(const Work& work) { work(); }
void store_later(const Work& work) { fiber().stores.open.push_back(work); }
void close_stores() { fiber().stores.close(); }
void wait_for_stores() { fiber().stores.wait(0); }
bool has_stores() { return !fiber().stores.empty(); }

void wrote(unsigned address, unsigned bytes) {
  const auto me = static_cast<std::uint16_t>(current->index.x + 1);
  for (unsigned unit = address / kUnit; unit < (address + bytes) / kUnit; ++unit) {
    if (block->writers[unit] != me) fiber().unfenced.push_back(unit);
    block->writers[unit] = me;
  }
}

void fence_shared() {
  const auto me = static_cast<std::uint16_t>(current->index.x + 1);
  for (const unsigned unit : fiber().unfenced) {
    if (block->writers[unit] == me) block->writers[unit] = 0;
  }
  fiber().unfenced.clear();
}

static void run_fiber() {
  (*kernel)();
  current->done = true;
  stop();
}

// Runs the fibers of a warp until none can continue; returns whether any ran.
static bool run_warp(int first) {
  bool progress = false, again = true;
  while (again) {
    again = false;
    for (int i = first; i < first + kWarp; ++i) {
      Fiber& fiber = state().fibers[i];
      if (!fiber.runnable()) continue;
      go_on(fiber);
      progress = again = true;
    }
  }
  return progress;
}

static void begin_fibers(std::vector<Fiber>& fibers) {
  for (unsigned i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    fiber.index.x = i;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.get();
    fiber.begin.uc_stack.ss_size = kStack;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_fiber, 0);
  }
}

// Fails where a block has left something undone.
static void check_end(const State& ended) {
  for (const Fiber& fiber : ended.fibers) {
    if (!fiber.done) fail("a barrier that some threads never reach");
    if (!fiber.products.empty()) fail("products that nobody waits for");
    if (!fiber.stores.empty()) fail("stores of the copy engine that nobody waits for");
    if (fiber.asked != ended.fibers[fiber.index.x / 128 * 128].asked) {
      fail("products that a part of a warpgroup asks for");
    }
  }
  if (!ended.copies.empty()) fail("copies that nobody waits for");
  for (const Barrier& barrier : ended.named) {
    const bool last_turn = habits.passes_last && barrier.arrived == 128 && barrier.expected == 256;
    if (barrier.arrived != 0 && !last_turn) fail("a named barrier that is left half full");
  }
  for (const Warp& warp : ended.of_warps) {
    if (turns && warp.turn != nullptr) fail("a turn that is not passed");
  }
}

// Runs one block; `order` decides which warps run first.
static void run_block(int threads, unsigned order) {
  State mine;
  mine.fibers = std::vector<Fiber>(threads);
  mine.of_warps = std::vector<Warp>(threads / kWarp);
  mine.of_writers.assign(shared_size / 2, 0);
  mine.warps = mine.of_warps.data();
  mine.writers = mine.of_writers.data();
  mine.threads = threads;
  block = &mine;
  begin_fibers(mine.fibers);
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
    const bool ended = std::all_of(mine.fibers.begin(), mine.fibers.end(),
                                   [](const Fiber& fiber) { return fiber.done; });
    if (!progress && !ended && !mine.copies.empty()) {
      const bool first = variant() % 2 == 0;  // copies end in any order
      const Arrival copy = first ? mine.copies.front() : mine.copies.back();
      first ? mine.copies.pop_front() : mine.copies.pop_back();
      finish(copy);
      progress = true;
    }
  }
  check_end(mine);
}

void launch(int grid, int threads, std::size_t shared_bytes, unsigned char* shared,
            Habits of_kernel, const Work& entry) {
  _mm_setcsr(_mm_getcsr() | 0x8040);  // subnormal numbers are flushed, as with -ftz=true
  kernel = &entry;
  turns = false;
  habits = of_kernel;
  shared_base = shared;
  shared_size = shared_bytes;
  grid_size.x = grid;
  block_size.x = threads;
  for (int i = 0; i < grid; ++i) {
    block_index.x = habits.any_order && last_first ? grid - 1 - i : i;
    run_block(threads, variant());
  }
  _mm_setcsr(_mm_getcsr() & ~0x8040u);
}

}  // namespace emulated
