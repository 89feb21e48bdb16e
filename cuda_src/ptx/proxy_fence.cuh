// fence.proxy.async: between what threads do to memory and what asynchronous units do.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: fence.proxy"; sm_90. What this
// thread wrote to shared memory is seen by warpgroup products and copies that come after.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The same of global memory, in both directions: what this thread knows to be written, by threads
// or by copies, is seen by either after it.
__device__ inline void fence_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace cuflash::ptx
