// stmatrix.trans: four 8x8 matrices of 16-bit elements from registers to shared memory, transposed.
#pragma once

namespace cuflash::ptx {

// PTX ISA "Warp-level matrix store instruction: stmatrix"; sm_90. Same as store_matrix_x4, but
// register i of lane l holds elements 2 * (l % 4) and 2 * (l % 4) + 1 of column l / 4 of matrix i,
// as memory will hold it.
__device__ inline void store_matrix_x4_transposed(unsigned row, const unsigned (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

}  // namespace cuflash::ptx
