// Stands for cuda_src/ptx/register_budget.cuh.
#pragma once

namespace cuflash::ptx {

template <int registers>
inline void give_registers() {}
template <int registers>
inline void take_registers() {}

}  // namespace cuflash::ptx
