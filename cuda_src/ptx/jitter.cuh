// nanosleep: wastes time on purpose.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Miscellaneous instructions: nanosleep"; sm_70. Sleeps 0 to 1 microsecond (the hardware
// up to twice as long); bits of the clock and the thread choose the time.
__device__ inline void nanosleep_at_random() {
  unsigned bits;
  asm volatile("mov.u32 %0, %%clock;\n" : "=r"(bits));
  bits = (bits ^ (threadIdx.x / 32 * 0x9e3779b9u) ^ (blockIdx.x * 0x85ebca6bu)) * 0xc2b2ae35u;
  asm volatile("nanosleep.u32 %0;\n" ::"r"(bits >> 22));
}

}  // namespace cuflash::ptx
