// Stands for cuda_src/ptx/opaque.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline int opaque_lane() { return emulated::lane(); }
inline int opaque_warp() { return static_cast<int>(threadIdx.x) / 32; }

template <class T>
inline T opaque(T x) {
  return x;
}

}  // namespace cuflash::ptx
