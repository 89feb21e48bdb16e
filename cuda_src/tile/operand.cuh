// Two ways to read a tile in shared memory as an operand of a product: with the depth (the axis
// summed over) along its rows, or, transposed, with the depth down its columns.
#pragma once

namespace cuflash {

// An offset that is zero at compile time.
struct Zero {
  __device__ constexpr operator int() const { return 0; }
};

// An offset of columns that shares no bit with the columns added to it within 128 bytes. It is a
// multiple of 128 bytes, or of a power of two that the operand does not exceed.
struct Aligned {
  int value;
  __device__ constexpr operator int() const { return value; }
};

// Whether an exclusive or can add a column to the offset.
template <class Offset>
constexpr bool is_aligned = false;
template <>
constexpr bool is_aligned<Zero> = true;
template <>
constexpr bool is_aligned<Aligned> = true;

// The offset of part `part` of a row that is divided into equal parts of `columns` columns.
template <class Tile, int columns>
__device__ inline auto part_offset(int part) {
  constexpr int bytes = columns * static_cast<int>(sizeof(typename Tile::Element));
  if constexpr (bytes % 128 == 0 || (bytes & (bytes - 1)) == 0) {
    return Aligned{part * columns};
  } else {
    return part * columns;
  }
}

// Operand element (row, depth) is tile element (row0 + row, depth0 + depth).
template <class Tile_, class Offset>
struct RowsByDepth {
  using Tile = Tile_;
  Tile tile;
  int row0;
  Offset depth0;
};

// Operand element (row, depth) is tile element (depth0 + depth, row0 + row).
template <class Tile_, class Offset>
struct DepthByRows {
  using Tile = Tile_;
  Tile tile;
  Offset row0;
  int depth0;
};

template <class Tile, class Offset = Zero>
__device__ inline RowsByDepth<Tile, Offset> rows_by_depth(const Tile& tile, int row0,
                                                          Offset depth0 = {}) {
  return {tile, row0, depth0};
}

template <class Tile, class Offset>
__device__ inline DepthByRows<Tile, Offset> depth_by_rows(const Tile& tile, Offset row0,
                                                          int depth0 = 0) {
  return {tile, row0, depth0};
}

}  // namespace cuflash
