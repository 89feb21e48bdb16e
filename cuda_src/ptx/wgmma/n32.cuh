// wgmma with 32 columns. Written by tools/write_wgmma.py; see ../wgmma.cuh.
// clang-format off
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cuflash::ptx {

// d = a b, or d += a b with `accumulate`; f16, both operands in shared memory.
template <bool transpose_a, bool transpose_b>
__device__ inline void wgmma(__half, float (&d)[4][2][2], unsigned long long a,
                             unsigned long long b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "%16, %17, p, 1, 1, %19, %20;\n}\n"
    : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][1][0]), "+f"(d[0][1][1]),
      "+f"(d[1][0][0]), "+f"(d[1][0][1]), "+f"(d[1][1][0]), "+f"(d[1][1][1]),
      "+f"(d[2][0][0]), "+f"(d[2][0][1]), "+f"(d[2][1][0]), "+f"(d[2][1][1]),
      "+f"(d[3][0][0]), "+f"(d[3][0][1]), "+f"(d[3][1][0]), "+f"(d[3][1][1])
    : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transpose_a), "n"(transpose_b));
}

// d += a b; f16, a in registers.
template <bool transpose_b>
__device__ inline void wgmma(__half, float (&d)[4][2][2], const unsigned (&a)[4],
                             unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "{%16, %17, %18, %19}, %20, p, 1, 1, %21;\n}\n"
    : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][1][0]), "+f"(d[0][1][1]),
      "+f"(d[1][0][0]), "+f"(d[1][0][1]), "+f"(d[1][1][0]), "+f"(d[1][1][1]),
      "+f"(d[2][0][0]), "+f"(d[2][0][1]), "+f"(d[2][1][0]), "+f"(d[2][1][1]),
      "+f"(d[3][0][0]), "+f"(d[3][0][1]), "+f"(d[3][1][0]), "+f"(d[3][1][1])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transpose_b));
}

// d = a b, or d += a b with `accumulate`; bf16, both operands in shared memory.
template <bool transpose_a, bool transpose_b>
__device__ inline void wgmma(__nv_bfloat16, float (&d)[4][2][2], unsigned long long a,
                             unsigned long long b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "%16, %17, p, 1, 1, %19, %20;\n}\n"
    : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][1][0]), "+f"(d[0][1][1]),
      "+f"(d[1][0][0]), "+f"(d[1][0][1]), "+f"(d[1][1][0]), "+f"(d[1][1][1]),
      "+f"(d[2][0][0]), "+f"(d[2][0][1]), "+f"(d[2][1][0]), "+f"(d[2][1][1]),
      "+f"(d[3][0][0]), "+f"(d[3][0][1]), "+f"(d[3][1][0]), "+f"(d[3][1][1])
    : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(transpose_a), "n"(transpose_b));
}

// d += a b; bf16, a in registers.
template <bool transpose_b>
__device__ inline void wgmma(__nv_bfloat16, float (&d)[4][2][2], const unsigned (&a)[4],
                             unsigned long long b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
    "{%16, %17, %18, %19}, %20, p, 1, 1, %21;\n}\n"
    : "+f"(d[0][0][0]), "+f"(d[0][0][1]), "+f"(d[0][1][0]), "+f"(d[0][1][1]),
      "+f"(d[1][0][0]), "+f"(d[1][0][1]), "+f"(d[1][1][0]), "+f"(d[1][1][1]),
      "+f"(d[2][0][0]), "+f"(d[2][0][1]), "+f"(d[2][1][0]), "+f"(d[2][1][1]),
      "+f"(d[3][0][0]), "+f"(d[3][0][1]), "+f"(d[3][1][0]), "+f"(d[3][1][1])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transpose_b));
}

}  // namespace cuflash::ptx
