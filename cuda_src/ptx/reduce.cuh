// red: additions to device memory that nobody waits for.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Parallel synchronization and communication instructions: red"; every architecture.
__device__ inline void reduce_add(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(to), "f"(x) : "memory");
}
__device__ inline void reduce_add(double* to, double x) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;\n" ::"l"(to), "d"(x) : "memory");
}

// to[i] += x[i]; from sm_90 on four numbers by one instruction, `to` 16-byte aligned.
template <class T, int count>
__device__ inline void reduce_add(T* to, const T (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) reduce_add(to + i, x[i]);
}
#if __CUDA_ARCH__ >= 900
__device__ inline void reduce_add(float* to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

}  // namespace cuflash::ptx
