// mma.sync: products of warp fragments.
// PTX ISA "Warp-level matrix instructions: mma". In all of them lane l holds columns 2 * (l % 4)
// and 2 * (l % 4) + 1 of rows l / 4 (c0, c1) and l / 4 + 8 (c2, c3) of the 16x8 accumulator.
// An unused first argument selects the type of the operands.
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

// Operands of four and eight bytes: a[i] is element (l / 4 + i % 2 * 8, l % 4 + i / 2 * 4) of A,
// b[i] element (l % 4 + i * 4, l / 4) of B.

// m16n8k8, tf32; sm_80. Only the upper 19 bits of an operand are read.
__device__ inline void mma_m16n8k8(float (&c)[2][2], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// m8n8k4, float64; sm_80. The accumulator has only c0 and c1.
__device__ inline void mma_m8n8k4(double (&c)[1][2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
      : "+d"(c[0][0]), "+d"(c[0][1])
      : "d"(a), "d"(b));
}

// m16n8k8, float64; sm_90.
__device__ inline void mma_m16n8k8(double (&c)[2][2], const double (&a)[4], const double (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

// m16n8k16, float64; sm_90.
__device__ inline void mma_m16n8k16(double (&c)[2][2], const double (&a)[8], const double (&b)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};\n"
      : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

}  // namespace cuflash::ptx
