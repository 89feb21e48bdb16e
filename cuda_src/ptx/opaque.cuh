// Values the compiler must not see through.
#pragma once

namespace cuflash::ptx {

// The number of this thread and its lane, as values of their own at every call. Addresses derived
// from them are computed where they are used: the compiler would otherwise keep every address of
// an unrolled loop in a register across the loops around it, and spill.
__device__ inline int opaque_thread() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}
__device__ inline int opaque_lane() { return opaque_thread() & 31; }

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
