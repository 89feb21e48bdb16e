// bar.arrive: coming to a barrier of a part of the block without waiting there.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: bar"; every architecture.
// Counts as this thread's coming to barrier `id`; the others wait with named_barrier.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuflash::ptx
