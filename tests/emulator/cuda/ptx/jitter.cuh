// Stands for cuda_src/ptx/jitter.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline void nanosleep_at_random() { emulated::pause(); }

}  // namespace cuflash::ptx
