// bar.arrive: arrives at a barrier for a part of the block without waiting.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: bar"; every architecture.
// Counts this thread's arrival at barrier `id`; other threads wait with named_barrier.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuflash::ptx
