// A counter in device memory by which thread blocks take turns.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Memory consistency model"; sm_70. What was written before a pass_turn of this counter
// is seen after the read that returns its count.
__device__ inline int read_turn(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Adds one, after everything that this thread, and the threads it has met at a barrier, wrote.
__device__ inline void pass_turn(int* counter) {
  asm volatile("fence.acq_rel.gpu;\n" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

}  // namespace cuflash::ptx
