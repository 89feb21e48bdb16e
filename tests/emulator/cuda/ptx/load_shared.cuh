// Stands for cuda_src/ptx/load_shared.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

template <class T>
inline void load_shared(T& x, unsigned address) {
  std::memcpy(&x, emulated::shared_at(address, sizeof x), sizeof x);
}

}  // namespace cuflash::ptx
