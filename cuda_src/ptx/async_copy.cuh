// cp.async: copies from global to shared memory that run beside the arithmetic.
// PTX ISA "Data movement and conversion instructions: cp.async"; sm_80.
#pragma once

#include "load_matrix.cuh"

namespace cuflash::ptx {

// Copies 16 bytes past L1 to an address in the shared window. It reads `bytes` of them (0 or 16)
// and writes zeros for the rest. Both addresses are 16-byte aligned, even if nothing is read.
__device__ inline void async_copy_16(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same if `wanted`; otherwise does nothing. It has no branch.
__device__ inline void async_copy_16_if(bool wanted, unsigned shared, const void* global,
                                        int bytes) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %0, 0;\n"
      "@wanted cp.async.cg.shared.global [%1], [%2], 16, %3;\n"
      "}\n" ::"r"(static_cast<int>(wanted)),
      "r"(shared), "l"(global), "r"(bytes)
      : "memory");
}

// Closes the group of all copies this thread has issued since the last one.
__device__ inline void async_copy_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ inline void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

}  // namespace cuflash::ptx
