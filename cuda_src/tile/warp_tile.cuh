// The part of a matrix that one warp holds in its registers, in the layout of the matrix
// instructions' accumulators. In every fragment of `fragment_rows` x 8, lane l holds columns 2 * (l
// % 4) and 2 * (l % 4) + 1 of row l / 4 and, if there are 16 rows, of row l / 4 + 8. The scalar
// products use the same layout, so softmax, masks and stores exist once.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/opaque.cuh"

namespace cuflash {

// A lane's position in every fragment: its (first) row and the first of its two columns.
struct LanePosition {
  int row;
  int column;
  __device__ LanePosition() {
    const int lane = ptx::opaque_lane();
    row = lane / 4;
    column = lane % 4 * 2;
  }
};

// For a lane at `position`, value[m][n][group][which] is the element at row position.row + row(m,
// group) and column position.column + column(n, which) of the tile. Both row(m, group) and
// column(n, which) are compile-time constants.
template <class Compute_, int fragment_rows_, int rows_, int columns_>
struct WarpTile {
  using Compute = Compute_;
  static constexpr int fragment_rows = fragment_rows_;
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int row_fragments = rows / fragment_rows;
  static constexpr int row_groups = fragment_rows / 8;
  static constexpr int column_fragments = columns / 8;
  static_assert(rows % fragment_rows == 0 && columns % 8 == 0, "a warp tile is whole fragments");

  Compute value[row_fragments][column_fragments][row_groups][2];

  __device__ static constexpr int row(int m, int group) { return m * fragment_rows + group * 8; }
  __device__ static constexpr int column(int n, int which = 0) { return n * 8 + which; }

  __device__ void fill(Compute with) {
    for_each([&](Compute& x, int, int, int, int) { x = with; });
  }

  // Calls function(element, m, n, group, which) for every element this lane holds.
  template <class Function>
  __device__ void for_each(Function function) {
    for_each_pair([&](int m, int n, int group) {
      function(value[m][n][group][0], m, n, group, 0);
      function(value[m][n][group][1], m, n, group, 1);
    });
  }

  // Calls function(m, n, group) for every pair of neighbouring columns this lane holds.
  template <class Function>
  __device__ static void for_each_pair(Function function) {
#pragma unroll
    for (int m = 0; m < row_fragments; ++m) {
#pragma unroll
      for (int n = 0; n < column_fragments; ++n) {
#pragma unroll
        for (int group = 0; group < row_groups; ++group) function(m, n, group);
      }
    }
  }
};

// One number for each row of a warp tile in which this lane has elements; the four lanes of a row
// hold copies.
template <class Tile>
struct RowValues {
  typename Tile::Compute value[Tile::row_fragments][Tile::row_groups];

  // Calls function(number, m, group) for every row in which this lane has elements.
  template <class Function>
  __device__ void for_each(Function function) {
#pragma unroll
    for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
      for (int group = 0; group < Tile::row_groups; ++group) function(value[m][group], m, group);
    }
  }
};

// Combines the numbers of the four lanes that share a row.
template <class Compute, class Function>
__device__ inline Compute combine_row_lanes(Compute x, Function function) {
  x = function(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return function(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// A block's warps laid over a matrix as a grid, row by row; warps beyond it are idle.
template <int grid_rows, int grid_columns>
struct WarpGrid {
  static constexpr int warps = grid_rows * grid_columns;
  int row;
  int column;
  bool active;
  __device__ WarpGrid()
      : row((threadIdx.x / 32) / grid_columns),
        column((threadIdx.x / 32) % grid_columns),
        active(threadIdx.x / 32 < warps) {}

  // The warps of one grid row, as a group with its own named barrier.
  static constexpr int row_threads = 32 * grid_columns;
  __device__ int row_thread() const { return column * 32 + threadIdx.x % 32; }
  __device__ void sync_row() const {
    if constexpr (grid_columns == 1) {
      __syncwarp();
    } else {
      static_assert(grid_rows <= 15, "one named barrier for each row");
      ptx::named_barrier(1 + row, row_threads);
    }
  }
};

}  // namespace cuflash
