// Stores a warp's tile of 16-bit results through the warp's own part of shared memory.
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/store_matrix.cuh"
#include "numeric.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// 16 rows of 64 columns of 16 bits. A row's lowest three bits permute its 16-byte chunks.
struct alignas(1024) StagedRows {
  uint4 chunks[16][8];
};

// Stores the valid rows and columns of the tile, rounded to T, in rows of memory that start at
// multiples of 16 bytes. The number of valid columns is a multiple of eight.
template <class Tile, class T>
__device__ __forceinline__ void store_staged(const Tile& tile, StagedRows& staging, T* memory,
                                             long long row_stride, int valid_rows,
                                             int valid_columns) {
  static_assert(sizeof(T) == 2 && Tile::rows == 16 && Tile::columns % 16 == 0, "rows of a warp");
  const int lane = ptx::opaque_lane();
  const int written = lane % 16;
  const unsigned to = ptx::shared_address(&staging.chunks[written][0]);
  const int read = lane / 8;
  T* const out = memory + read * row_stride + lane % 8 * 8;
#pragma unroll
  for (int first = 0; first < Tile::columns; first += 64) {
    __syncwarp();  // every lane has read the old rows
#pragma unroll
    for (int column = 0; column < 64 && first + column < Tile::columns; column += 16) {
      // Matrices 0 and 1 are rows 0-7 and 8-15 of eight columns, 2 and 3 of the eight after them.
      const auto& near = tile.value[0][(first + column) / 8];
      const auto& far = tile.value[0][(first + column) / 8 + 1];
      ptx::store_matrix_x4(to + ((column / 8 + lane / 16) ^ (written % 8)) * 16,
                           {pack(T{}, near[0][0], near[0][1]), pack(T{}, near[1][0], near[1][1]),
                            pack(T{}, far[0][0], far[0][1]), pack(T{}, far[1][0], far[1][1])});
    }
    __syncwarp();
    const bool valid = first + lane % 8 * 8 < valid_columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = read + 4 * i;
      if (valid && row < valid_rows) {
        *reinterpret_cast<uint4*>(out + 4 * i * row_stride + first) =
            staging.chunks[row][lane % 8 ^ row % 8];
      }
    }
  }
}

}  // namespace cuflash
