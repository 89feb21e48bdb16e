// Stands for cuda_src/ptx/barrier.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void named_barrier(int id, int threads) {
  emulated::wait(emulated::block->named[id], threads);
}

}  // namespace cuflash::ptx
