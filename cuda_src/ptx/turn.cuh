// A counter in device memory by which thread blocks take turns.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Memory consistency model"; sm_70. A thread that reads a count sees everything written
// before the pass_turn calls that led to it.
__device__ inline int read_turn(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// Adds one, after all writes of this thread and of the threads that shared a barrier with it.
__device__ inline void pass_turn(int* counter) {
  asm volatile("fence.acq_rel.gpu;\n" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;\n" ::"l"(counter) : "memory");
}

}  // namespace cuflash::ptx
