// prefetch: starts to load a line of global memory into L1.
// PTX ISA "Data movement and conversion instructions: prefetch".
#pragma once

namespace cuflash::ptx {

__device__ inline void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(address));
}

}  // namespace cuflash::ptx
