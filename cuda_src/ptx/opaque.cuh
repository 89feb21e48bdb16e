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

// The same of the warp's number in its block.
__device__ inline int opaque_warp() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread / 32;
}

// A value that is computed here, once, and not taken apart again where it is used.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class T>
__device__ inline const T* opaque(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace cuflash::ptx
