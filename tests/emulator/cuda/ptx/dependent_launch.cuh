// Stands for cuda_src/ptx/dependent_launch.cuh: kernels run one after the other.
#pragma once

namespace cuflash::ptx {

inline void let_next_kernel_begin() {}
inline void wait_for_kernel_before() {}

}  // namespace cuflash::ptx
