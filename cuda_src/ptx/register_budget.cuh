// setmaxnreg: warpgroups give registers to each other.
// PTX ISA "Miscellaneous instructions: setmaxnreg"; sm_90a. All warps of a warpgroup execute it;
// the number is a multiple of 8 from 24 to 256.
#pragma once

namespace cuflash::ptx {

template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(registers));
}

// Waits until that many registers are free.
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(registers));
}

}  // namespace cuflash::ptx
