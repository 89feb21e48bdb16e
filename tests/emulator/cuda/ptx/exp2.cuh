// Stands for cuda_src/ptx/exp2.cuh.
#pragma once

#include "../emulated.hpp"

namespace cuflash::ptx {

inline float exp2_approximate(float x) { return exp2f(x); }

}  // namespace cuflash::ptx
