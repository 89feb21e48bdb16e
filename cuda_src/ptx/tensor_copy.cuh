// cp.async.bulk.tensor: boxes of a tensor from global to shared memory, by the copy engine.
// PTX ISA "Data movement and conversion instructions: cp.async.bulk.tensor"; sm_90.
#pragma once

#include "load_matrix.cuh"

namespace cuflash::ptx {

// L2 policies, as createpolicy.fractional encodes them for a whole access.
constexpr unsigned long long kEvictFirst = 0x12F0000000000000ull;
constexpr unsigned long long kEvictLast = 0x14F0000000000000ull;

// Copies the box at (column, row, head, batch) to shared memory; its bytes count on the barrier.
// Elements outside the tensor become zero.
__device__ inline void tensor_load(unsigned shared, const void* map, unsigned barrier, int column,
                                   int row, int head, int batch, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Fetches a tensor map ahead of its first use.
__device__ inline void tensor_map_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace cuflash::ptx
