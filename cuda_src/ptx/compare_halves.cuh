// set: comparisons of two float16 numbers at once.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Half precision comparison instructions: set"; sm_53 and newer. Sets every half where a
// is less than b to ones; subnormal numbers are not flushed.
__device__ inline unsigned halves_less_than(unsigned a, unsigned b) {
  unsigned mask;
  asm("set.lt.u32.f16x2 %0, %1, %2;\n" : "=r"(mask) : "r"(a), "r"(b));
  return mask;
}

}  // namespace cuflash::ptx
