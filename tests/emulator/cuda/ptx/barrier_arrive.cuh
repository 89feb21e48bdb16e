// Stands for cuda_src/ptx/barrier_arrive.cuh. A thread that does not wait may run ahead of the
// others or fall behind; blocks alternate between the two.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void named_barrier_arrive(int id, int threads) {
  emulated::arrive(emulated::block->named[id], threads);
  emulated::pause();
}

}  // namespace cuflash::ptx
