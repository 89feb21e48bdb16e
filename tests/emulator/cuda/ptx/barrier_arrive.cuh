// Stands for cuda_src/ptx/barrier_arrive.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void named_barrier_arrive(int id, int threads) {
  emulated::arrive(emulated::block->named[id], threads);
}

}  // namespace cuflash::ptx
