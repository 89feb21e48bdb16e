// What threads of an emulated block do at barriers. The functions without a body here are in
// scheduler.hpp, which is compiled once for all kernels.
#pragma once

#include "state.hpp"

namespace emulated {

// The number that the bits of each float16 stand for.
extern const float* const floats_of_halves;

[[noreturn]] void fail(const char* what);
// Lets other threads run; returns when this one is run again.
void stop();
// In half of the blocks, lets the other warps run first.
void pause();

// Runs a kernel, each of whose threads calls `entry`.
void launch(int grid, int threads, std::size_t shared_bytes, unsigned char* shared,
            Habits of_kernel, const Work& entry);

// Barriers with phases, by their addresses in shared memory.
void begin_phases(unsigned address, unsigned arrivals);
PhaseBarrier& phases_at(unsigned address);
void arrive(PhaseBarrier& barrier, unsigned bytes);
// Waits until the phase of this parity has ended.
void wait(const PhaseBarrier& barrier, unsigned parity);

// Does a copy whose bytes count on a barrier, at once or when no thread can continue without it.
void copy_later(unsigned barrier, unsigned bytes, const Work& work);

// Groups of a thread's copies of 16 bytes.
void finish(const Copy& copy);
void copy_with_group(const Copy& copy);
void close_copies();
void wait_for_copies(unsigned pending);

// Groups of a thread's products. No other code may change the `count` sums to which a product adds
// until it is done.
void note_product(unsigned long long what);
void multiply_later(const float* sums, unsigned count, const Work& work);
void close_products();
void wait_for_products(unsigned pending);

// Groups of a thread's stores by the copy engine.
void store_later(const Work& work);
void close_stores();
void wait_for_stores();
bool has_stores();

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

inline unsigned char* shared_at(unsigned address, unsigned bytes) {
  if (address % bytes != 0 || address > shared_size - bytes)
    fail("address outside of shared memory");
  return shared_base + address;
}

}  // namespace emulated
