// Runs a thread block of CUDA code on the CPU. Every thread is a fiber; fibers switch at
// collectives and barriers. Warps run one after the other, each as far as it can, so that a missing
// wait or barrier shows. Asynchronous work (copies, products of a warpgroup) is done at once or at
// the last moment that the waits allow; warps, blocks and barriers alternate between the two. The
// emulator aborts at a wrong address in shared memory, at a barrier that never opens, at a barrier
// that threads meet with different counts, and at one that a block leaves half full.
#pragma once

#include "state.hpp"

namespace emulated {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated block %u thread %u: %s\n", block_index.x,
               current ? current->index.x : 0u, what);
  std::abort();
}

// Returns to the scheduler. It jumps, because swapcontext makes two system calls.
inline void stop() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

// Runs a fiber until it stops.
[[gnu::noinline]] inline void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

inline int lane() { return static_cast<int>(current->index.x) % kWarp; }
inline Warp& warp() { return block->warps[current->index.x / kWarp]; }

// Counts an arrival; true for the last of `count`.
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
  stop();
  current->waiting = nullptr;
}

// A number by which blocks and launches alternate between two ways to do something.
inline unsigned variant() { return block_index.x + launches; }

// In half of the blocks, lets the other warps run first.
inline void pause() {
  if (variant() / 2 % 2 != 0) return;
  current->paused = true;
  stop();
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

// Written at barriers in shared memory; a barrier without this mark has been overwritten.
constexpr std::uint64_t kBarrierMark = 0xba881e80ba881e8full;

inline PhaseBarrier& phases_at(unsigned address) {
  const auto found = block->phases.find(address);
  if (found == block->phases.end()) fail("a barrier that was not initialised");
  if (std::memcmp(shared_base + address, &kBarrierMark, sizeof kBarrierMark) != 0) {
    fail("something was written where a barrier lies");
  }
  return found->second;
}

inline void end_phase_if_complete(PhaseBarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.phase ^= 1;
}

inline void arrive(PhaseBarrier& barrier, unsigned bytes) {
  if (barrier.missing == 0) fail("an arrival too many at a barrier");
  barrier.bytes += bytes;
  --barrier.missing;
  end_phase_if_complete(barrier);
}

// Waits until the phase of this parity has ended.
inline void wait(const PhaseBarrier& barrier, unsigned parity) {
  if (barrier.phase != parity) return;
  current->phases = &barrier;
  current->phase = parity;
  stop();
  current->phases = nullptr;
}

// Does a copy whose bytes count on a barrier, at once or when no thread can continue without it.
inline void copy_later(unsigned barrier, unsigned bytes, Work work) {
  PhaseBarrier& phases = phases_at(barrier);
  Work whole = [work = std::move(work), &phases, bytes] {
    work();
    phases.bytes -= bytes;
    end_phase_if_complete(phases);
  };
  if ((barrier / 8 + variant()) % 2 == 0) {
    whole();
  } else {
    block->copies.push_back(std::move(whole));
  }
}

inline void finish_group(const std::vector<Copy>& group) {
  for (const Copy& copy : group) {
    if (copy.valid) {
      reads(copy.from, 16);
      std::memcpy(copy.to, copy.from, 16);
    } else {
      std::memset(copy.to, 0, 16);
    }
  }
}

inline unsigned char* shared_at(unsigned address, unsigned bytes) {
  if (address % bytes != 0 || address > shared_size - bytes)
    fail("address outside of shared memory");
  return shared_base + address;
}

inline void run_fiber() {
  (*kernel)();
  current->done = true;
  stop();
}

// Runs the fibers of a warp until none can continue; returns whether any ran.
inline bool run_warp(int first) {
  bool progress = false, again = true;
  while (again) {
    again = false;
    for (int i = first; i < first + kWarp; ++i) {
      Fiber& fiber = block->fibers[i];
      if (!fiber.runnable()) continue;
      go_on(fiber);
      progress = again = true;
    }
  }
  return progress;
}

// Runs one block; `order` decides which warps run first.
inline void run_block(int threads, unsigned order) {
  Block mine;
  mine.fibers = std::vector<Fiber>(threads);
  mine.warps = std::vector<Warp>(threads / kWarp);
  mine.writers.assign(shared_size / 2, 0);
  block = &mine;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = mine.fibers[i];
    fiber.index.x = i;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.get();
    fiber.begin.uc_stack.ss_size = kStack;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_fiber, 0);
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
    const bool ended = std::all_of(mine.fibers.begin(), mine.fibers.end(),
                                   [](const Fiber& fiber) { return fiber.done; });
    if (!progress && !ended && !mine.copies.empty()) {
      const bool first = variant() % 2 == 0;  // copies end in any order
      const Work copy = std::move(first ? mine.copies.front() : mine.copies.back());
      first ? mine.copies.pop_front() : mine.copies.pop_back();
      copy();
      progress = true;
    }
  }
  for (const Fiber& fiber : mine.fibers) {
    if (!fiber.done) fail("a barrier that some threads never reach");
    if (!fiber.products.empty()) fail("products that nobody waits for");
    if (!fiber.stores.empty()) fail("stores of the copy engine that nobody waits for");
    if (fiber.asked != mine.fibers[fiber.index.x / 128 * 128].asked) {
      fail("products that a part of a warpgroup asks for");
    }
  }
  if (!mine.copies.empty()) fail("copies that nobody waits for");
  for (const Barrier& barrier : mine.named) {
    const bool last_turn = habits.passes_last && barrier.arrived == 128 && barrier.expected == 256;
    if (barrier.arrived != 0 && !last_turn) fail("a named barrier that is left half full");
  }
  for (const Warp& warp : mine.warps) {
    if (turns && warp.turn != nullptr) fail("a turn that is not passed");
  }
}

inline void launch(int grid, int threads, std::size_t shared_bytes, unsigned char* shared,
                   Habits of_kernel, const std::function<void()>& entry) {
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
