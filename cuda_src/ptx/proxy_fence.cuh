// fence.proxy.async: orders memory accesses of threads and of asynchronous units.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: fence.proxy"; sm_90. Later
// warpgroup products and copies see what this thread has written to shared memory.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The same for global memory, in both directions: later accesses by threads and copies see all
// writes of threads and copies whose completion this thread has observed.
__device__ inline void fence_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace cuflash::ptx
