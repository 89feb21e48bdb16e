// wgmma: products of 64 rows by the four warps of a warpgroup, with operands in shared memory. They
// run beside the warps' next instructions. PTX ISA "Asynchronous warpgroup level matrix
// instructions"; sm_90a.
//
// Accumulators: warp w holds rows 16 w to 16 w + 15, as d[column / 8][row / 8 % 2][column % 2] in
// the layout of tile/warp_tile.cuh. Between wgmma_commit and the wgmma_wait that retires it nothing
// may touch a product's accumulators or its operand in registers.
#pragma once

#include "wgmma/n112.cuh"
#include "wgmma/n128.cuh"
#include "wgmma/n160.cuh"
#include "wgmma/n192.cuh"
#include "wgmma/n256.cuh"
#include "wgmma/n32.cuh"
#include "wgmma/n48.cuh"
#include "wgmma/n64.cuh"
#include "wgmma/n80.cuh"
#include "wgmma/n96.cuh"

namespace cuflash::ptx {

// Orders the warps' accesses to registers before the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Closes the group of all products issued since the last one.
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most `pending` of the latest groups are under way.
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}

// No instruction: the compiler may not move reads or writes of these accumulators across it.
template <int fragments>
__device__ inline void wgmma_hold(float (&d)[fragments][2][2]) {
#pragma unroll
  for (int i = 0; i < fragments; ++i) {
    asm volatile(""
                 : "+f"(d[i][0][0]), "+f"(d[i][0][1]), "+f"(d[i][1][0]),
                   "+f"(d[i][1][1])::"memory");
  }
}

// wgmma_hold() for operands in registers: the compiler computes them here and frees their inputs.
template <int fragments>
__device__ inline void wgmma_hold(unsigned (&a)[fragments][4]) {
#pragma unroll
  for (int i = 0; i < fragments; ++i) {
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  }
}

}  // namespace cuflash::ptx
