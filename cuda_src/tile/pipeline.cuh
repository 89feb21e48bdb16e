// Rings of buffers in shared memory between warps that fill them and warps that read them.
//
// Each buffer has two mbarriers. `full`: the filler arrives once and announces the bytes; the copy
// engine counts them down. `empty`: every reading warp arrives once it has read the buffer.
#pragma once

#include "../ptx/jitter.cuh"
#include "../ptx/load_matrix.cuh"
#include "../ptx/mbarrier.cuh"

namespace cuflash {

// The buffer of a ring that comes next, and the parity of its phase: 0 in the first round.
template <int stages>
struct PipelineState {
  unsigned stage = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if constexpr (stages == 1) {
      phase ^= 1;
    } else {
      stage = stage + 1 == stages ? 0 : stage + 1;
      phase ^= stage == 0;
    }
  }
};

using Barrier = unsigned long long;

// With Config::jitter every barrier operation is delayed by a short random time, so that code fails
// if it relies on an order that no barrier enforces. A wait that never ends then traps.
template <class Config>
__device__ inline void jitter() {
  if constexpr (Config::jitter) ptx::nanosleep_at_random();
}

template <class Config>
__device__ __forceinline__ void wait(const Barrier& barrier, unsigned phase) {
  jitter<Config>();
  if constexpr (Config::jitter) {
    ptx::mbarrier_wait_or_trap(ptx::shared_address(&barrier), phase);
  } else {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), phase);
  }
}

// The filler of a buffer waits for the phase before the one it will fill.
template <class Config>
__device__ __forceinline__ void wait_empty(const Barrier& barrier, unsigned phase) {
  wait<Config>(barrier, phase ^ 1);
}

template <class Config>
__device__ __forceinline__ void arrive(Barrier& barrier) {
  jitter<Config>();
  ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

// One arrival for the whole warp. All its lanes have read the buffer when it arrives.
template <class Config>
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  if (threadIdx.x % 32 == 0) arrive<Config>(barrier);
}

template <class Config>
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, unsigned bytes) {
  jitter<Config>();
  ptx::mbarrier_arrive_expecting(ptx::shared_address(&barrier), bytes);
}

}  // namespace cuflash
