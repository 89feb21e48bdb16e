// Values the compiler must not see through.
#pragma once

namespace cuflash::ptx {

// The lane of this thread, as a value of its own at every call. Addresses derived from it are
// computed where they are used: the compiler would otherwise keep every address of an unrolled
// loop in a register across the loops around it, and spill.
__device__ inline int opaque_lane() {
  int lane = threadIdx.x;
  asm volatile("" : "+r"(lane));
  return lane & 31;
}

}  // namespace cuflash::ptx
