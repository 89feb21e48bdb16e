// Values that the compiler must not see through.
#pragma once

namespace cuflash::ptx {

// The lane of this thread, as a new value at every call. Addresses derived from it are computed
// where they are used. Otherwise the compiler would keep every address of an unrolled loop in a
// register across the outer loops, and spill.
__device__ inline int opaque_lane() {
  int lane = threadIdx.x;
  asm volatile("" : "+r"(lane));
  return lane & 31;
}

// The same for the warp's number in its block.
__device__ inline int opaque_warp() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread / 32;
}

// A value that the compiler computes here, once, and does not recompute where it is used.
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
