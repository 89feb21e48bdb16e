// Two ways in which a tile in shared memory is an operand of a product: with the depth (the axis
// summed over) along its rows, or with the depth down its columns, that is transposed.
#pragma once

namespace cuflash {

// Operand element (row, depth) is tile element (row0 + row, depth0 + depth).
template <class Tile_>
struct RowsByDepth {
  using Tile = Tile_;
  Tile tile;
  int row0;
  int depth0;
};

// Operand element (row, depth) is tile element (depth0 + depth, row0 + row).
template <class Tile_>
struct DepthByRows {
  using Tile = Tile_;
  Tile tile;
  int row0;
  int depth0;
};

template <class Tile>
__device__ inline RowsByDepth<Tile> rows_by_depth(const Tile& tile, int row0, int depth0 = 0) {
  return {tile, row0, depth0};
}

template <class Tile>
__device__ inline DepthByRows<Tile> depth_by_rows(const Tile& tile, int row0, int depth0 = 0) {
  return {tile, row0, depth0};
}

}  // namespace cuflash
