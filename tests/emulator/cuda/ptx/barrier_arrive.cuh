// Stands for cuda_src/ptx/barrier_arrive.cuh. Who does not wait may go ahead or be overtaken:
// blocks have it both ways.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void named_barrier_arrive(int id, int threads) {
  emulated::arrive(emulated::block->named[id], threads);
  emulated::pause();
}

}  // namespace cuflash::ptx
