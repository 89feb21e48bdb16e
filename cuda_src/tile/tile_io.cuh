// Warp tiles to and from memory, two neighbouring columns at a time.
#pragma once

#include "../ptx/store_matrix.cuh"
#include "copy.cuh"
#include "numeric.cuh"
#include "operand.cuh"
#include "shared_tile.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Loads memory[row * stride + column] into a tile for the first `valid_rows` rows; clears the
// others.
template <class Tile, class Compute = typename Tile::Compute>
__device__ inline void load_tile(Tile& tile, const Compute* memory, int stride, int valid_rows) {
  const LanePosition lane;
  const Compute* from = memory + lane.row * stride + lane.column;
  Tile::for_each_pair([&](int m, int n, int group) {
    Pair<Compute> pair = {0, 0};
    if (lane.row + Tile::row(m, group) < valid_rows) {
      pair = *reinterpret_cast<const Pair<Compute>*>(from + Tile::row(m, group) * stride +
                                                     Tile::column(n));
    }
    tile.value[m][n][group][0] = pair.x;
    tile.value[m][n][group][1] = pair.y;
  });
}

// Stores the first `valid_rows` rows of a tile to memory[row * stride + column].
template <class Tile, class Compute = typename Tile::Compute>
__device__ inline void store_tile(const Tile& tile, Compute* memory, int stride, int valid_rows) {
  const LanePosition lane;
  Compute* to = memory + lane.row * stride + lane.column;
  Tile::for_each_pair([&](int m, int n, int group) {
    if (lane.row + Tile::row(m, group) >= valid_rows) return;
    *reinterpret_cast<Pair<Compute>*>(to + Tile::row(m, group) * stride + Tile::column(n)) = {
        tile.value[m][n][group][0], tile.value[m][n][group][1]};
  });
}

// Rounds two neighbouring elements of a row and stores those whose column is valid. With
// `whole_pairs` the row is aligned and the number of valid columns is even.
template <bool whole_pairs, class T, class Compute>
__device__ inline void store_pair(T* to, int column, int valid_columns, Compute x, Compute y) {
  const Pair<T> rounded = {from_compute<T>(x), from_compute<T>(y)};
  if constexpr (whole_pairs) {
    if (column < valid_columns) *reinterpret_cast<Pair<T>*>(to) = rounded;
  } else {
    if (column < valid_columns) to[0] = rounded.x;
    if (column + 1 < valid_columns) to[1] = rounded.y;
  }
}

// Stores the valid rows and columns of the tile times `factor`, rounded, in the rows of a tensor;
// `column0` is the tile's first column in the tensor.
template <bool whole_pairs, class Tile, class T, class Compute = typename Tile::Compute>
__device__ inline void store_rounded(const Tile& tile, T* memory, long long row_stride,
                                     int valid_rows, int column0, int valid_columns,
                                     Compute factor) {
  const LanePosition lane;
  const int column = column0 + lane.column;
  T* to = memory + lane.row * row_stride + column;
  Tile::for_each_pair([&](int m, int n, int group) {
    if (lane.row + Tile::row(m, group) >= valid_rows) return;
    const auto& pair = tile.value[m][n][group];
    store_pair<whole_pairs>(to + Tile::row(m, group) * row_stride + Tile::column(n),
                            column + Tile::column(n), valid_columns, pair[0] * factor,
                            pair[1] * factor);
  });
}

// Stores the tile, rounded, in shared memory; `column0` may be an Aligned offset.
template <int architecture, class Tile, class Shared, class Offset>
__device__ inline void store_shared(const Tile& tile, const Shared& shared, int row0,
                                    Offset column0) {
  using T = typename Shared::Element;
  if constexpr (architecture >= 90 && sizeof(T) == 2 && Tile::columns % 16 == 0) {
    // Matrices 0 and 1 are rows 0-7 and 8-15 of eight columns, 2 and 3 of the eight after them.
    const int lane = ptx::opaque_lane();
    const LaneChunks<Shared, is_aligned<Offset>> chunks{shared, row0 + lane % 16,
                                                        column0 / 8 + lane / 16};
#pragma unroll
    for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
      for (int n = 0; n < Tile::column_fragments; n += 2) {
        const auto& near = tile.value[m][n];
        const auto& far = tile.value[m][n + 1];
        ptx::store_matrix_x4(chunks.at(m * 16, n),
                             {pack(T{}, near[0][0], near[0][1]), pack(T{}, near[1][0], near[1][1]),
                              pack(T{}, far[0][0], far[0][1]), pack(T{}, far[1][0], far[1][1])});
      }
    }
  } else {
    const LanePosition lane;
    Tile::for_each_pair([&](int m, int n, int group) {
      const auto& pair = tile.value[m][n][group];
      *reinterpret_cast<Pair<T>*>(&shared.at(row0 + lane.row + Tile::row(m, group),
                                             column0 + lane.column + Tile::column(n))) = {
          from_compute<T>(pair[0]), from_compute<T>(pair[1])};
    });
  }
}

// One warp copies the valid rows and columns of a tile from shared memory to the rows of a tensor,
// 16 bytes at a time.
template <class Shared, class T>
__device__ inline void copy_out(const Shared& shared, int row0, int rows, T* memory,
                                long long row_stride, int valid_rows, int valid_columns) {
  const int lane = ptx::opaque_lane();
  constexpr int chunks = Shared::chunks;
  constexpr int lanes_per_row = chunks < 32 ? chunks : 32;
  constexpr int row_step = 32 / lanes_per_row;
  const int first_row = lane / lanes_per_row;
  if (first_row >= row_step) return;
#pragma unroll
  for (int chunk = lane % lanes_per_row; chunk < chunks; chunk += lanes_per_row) {
    if (chunk * Shared::chunk >= valid_columns) return;
#pragma unroll 4
    for (int row = first_row; row < min(rows, valid_rows); row += row_step) {
      *reinterpret_cast<Chunk*>(memory + row * row_stride + chunk * Shared::chunk) =
          *reinterpret_cast<const Chunk*>(shared.chunk_at(row0 + row, chunk));
    }
  }
}

// All `threads` of the block clear `rows` rows of a tensor.
template <bool whole_pairs, int threads, int columns, class T>
__device__ inline void store_zeros(T* memory, long long row_stride, int rows, int valid_columns) {
  for (int i = threadIdx.x; i < rows * (columns / 2); i += threads) {
    const int column = i % (columns / 2) * 2;
    store_pair<whole_pairs>(memory + i / (columns / 2) * row_stride + column, column, valid_columns,
                            0.0f, 0.0f);
  }
}

}  // namespace cuflash
