// Stands for cuda_src/ptx/opaque.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline int opaque_lane() { return emulated::lane(); }

template <class T>
inline T opaque(T x) {
  return x;
}

}  // namespace cuflash::ptx
