// Stands for cuda_src/ptx/reduce.cuh: blocks run one after the other.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

template <class T>
inline void reduce_add(T* to, T x) {
  if (emulated::turns && emulated::warp().turn == nullptr)
    emulated::fail("an addition out of turn");
  *to += x;
}

inline void reduce_add_four(float* to, const float (&x)[4]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
    emulated::fail("a vector reduction at an address that is not a multiple of its size");
  }
  for (int i = 0; i < 4; ++i) reduce_add(to + i, x[i]);
}

}  // namespace cuflash::ptx
