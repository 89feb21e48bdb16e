// Stores a warpgroup's transposed tile of 16-bit results through a matrix in shared memory.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/store_matrix_transposed.cuh"
#include "numeric.cuh"
#include "panels.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// The four warps of a warpgroup write a tile of columns x rows of `matrix`, rounded. In every
// product of 64 columns a warp has 16; Tile has these, product after product.
template <class Tile, class Matrix>
__device__ __forceinline__ void write_transposed(const Tile& tile, Matrix& matrix) {
  using T = typename Matrix::T;
  static_assert(Tile::rows * 4 == Matrix::columns && Tile::columns == Matrix::rows,
                "the tile is the whole matrix");
  const int lane = ptx::opaque_lane();
  const int chunk = ptx::opaque_warp() % 4 * 2 + lane / 8 % 2;
  const unsigned to =
      ptx::shared_address(matrix.data) + (lane / 16 * 8 + lane % 8) * 128 + (chunk ^ lane % 8) * 16;
#pragma unroll
  for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::column_fragments; n += 2) {
      // Matrices 0 and 1 are two times eight columns of eight rows, 2 and 3 of the next rows.
      const auto& near = tile.value[m][n];
      const auto& far = tile.value[m][n + 1];
      ptx::store_matrix_x4_transposed(
          to + m * Matrix::panel_bytes + n * 8 * 128,
          {pack(T{}, near[0][0], near[0][1]), pack(T{}, near[1][0], near[1][1]),
           pack(T{}, far[0][0], far[0][1]), pack(T{}, far[1][0], far[1][1])});
    }
  }
}

// 128 threads store the valid rows and columns of the matrix in rows of memory that start at
// multiples of 16 bytes. The number of valid columns is a multiple of eight.
template <class Matrix, class T>
__device__ __forceinline__ void store_matrix_rows(const Matrix& matrix, T* memory,
                                                  long long row_stride, int valid_rows,
                                                  int valid_columns) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int chunk = thread % 8;
  const auto* const chunks = reinterpret_cast<const uint4*>(matrix.data);
#pragma unroll 1
  for (int row = thread / 8; row < min(valid_rows, Matrix::rows); row += 16) {
    T* const to = memory + row * row_stride + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < Matrix::count; ++panel) {
      if (Matrix::first_column(panel) + chunk * 8 < valid_columns) {
        *reinterpret_cast<uint4*>(to + Matrix::first_column(panel)) =
            chunks[(panel * Matrix::rows + row) * 8 + (chunk ^ row % 8)];
      }
    }
  }
}

}  // namespace cuflash
