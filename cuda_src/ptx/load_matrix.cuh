// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory to one register a matrix.
#pragma once

namespace cuflash::ptx {

// The 32-bit shared-window address that PTX instructions take.
__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// PTX ISA "Warp-level matrix load instruction: ldmatrix"; sm_75. Lane l gives the shared-window
// address of row l % 8 of matrix l / 8; register i of lane l receives elements 2 * (l % 4) and 2 *
// (l % 4) + 1 of row l / 4.
__device__ inline void load_matrix_x4(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

// The same as float32: a matrix is 8 rows of four elements, and register i of lane l receives
// element l % 4 of row l / 4.
__device__ inline void load_matrix_x4(float (&d)[4], unsigned row) {
  unsigned bits[4];
  load_matrix_x4(bits, row);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(bits[i]);
}

// The same for 16-bit matrices, each transposed.
__device__ inline void load_matrix_x4_transposed(unsigned (&d)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

}  // namespace cuflash::ptx
