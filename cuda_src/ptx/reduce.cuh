// red: additions to device memory for which no thread waits.
// PTX ISA "Parallel synchronization and communication instructions: red".
#pragma once

namespace cuflash::ptx {

// *to += x; every architecture.
__device__ inline void reduce_add(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(to), "f"(x) : "memory");
}
__device__ inline void reduce_add(double* to, double x) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;\n" ::"l"(to), "d"(x) : "memory");
}

// to[i] += x[i] for four numbers, `to` 16-byte aligned; sm_90.
__device__ inline void reduce_add_four(float* to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace cuflash::ptx
