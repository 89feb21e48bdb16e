// Stands for cuda_src/ptx/reduce.cuh: blocks run one after the other.
#pragma once

namespace cuflash::ptx {

template <class T, int count>
inline void reduce_add(T* to, const T (&x)[count]) {
  if (reinterpret_cast<std::uintptr_t>(to) % (count * sizeof(T)) != 0) {
    emulated::fail("a vector reduction at an address that is not a multiple of its size");
  }
  for (int i = 0; i < count; ++i) to[i] += x[i];
}

}  // namespace cuflash::ptx
