// bar.sync: barriers of a part of the block.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: bar"; every architecture.
// Waits until `threads` threads (whole warps) have come to barrier `id`, 1 to 15; 0 is
// __syncthreads. Memory accesses before it are seen by all of them after it.
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cuflash::ptx
