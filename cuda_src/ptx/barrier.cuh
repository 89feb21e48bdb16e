// bar.sync: barriers for a part of the block.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: bar"; every architecture.
// Waits until `threads` threads (whole warps) have arrived at barrier `id`, 1 to 15; 0 is
// __syncthreads. Afterwards all of them see the memory accesses that any made before.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuflash::ptx
