// mma.sync: products of warp fragments with float32 accumulators.
// PTX ISA "Warp-level matrix instructions: mma". In all of them lane l holds, of the 16x8
// accumulator, columns 2 * (l % 4) and + 1 of rows l / 4 (c0, c1) and l / 4 + 8 (c2, c3).
// The first argument only names the type of the operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::ptx {

// m16n8k8, float16; sm_75. a0 and a1 are the rows l / 4 and l / 4 + 8 of A.
__device__ inline void mma_m16n8k8(__half, float& c0, float& c1, float& c2, float& c3, unsigned a0,
                                   unsigned a1, unsigned b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(b0));
}

// m16n8k16, float16; sm_80. A and B are two m16n8k8 operands side by side along the depth.
__device__ inline void mma_m16n8k16(__half, float& c0, float& c1, float& c2, float& c3,
                                    const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// m16n8k16, bfloat16; sm_80.
__device__ inline void mma_m16n8k16(__nv_bfloat16, float& c0, float& c1, float& c2, float& c3,
                                    const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cuflash::ptx
