// Stands for cuda_src/ptx/prefetch.cuh: reads the address, so that it must be valid.
#pragma once

#include "load_matrix.cuh"

namespace cuflash::ptx {

inline void prefetch(const void* address) { emulated::reads(address, 4); }

}  // namespace cuflash::ptx
