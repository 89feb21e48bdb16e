// Matrices in shared memory as the copy engine writes them and the warpgroup products read them. A
// matrix is a sequence of panels of 64 columns of 16 bits. A panel is a sequence of rows of 128
// bytes; the lowest three bits of a row's number permute its 16-byte chunks (the 128-byte swizzle).
// A panel starts at a multiple of 1024 bytes.
// PTX ISA "Asynchronous warpgroup level matrix instructions: shared memory layout".
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/tensor_copy.cuh"
#include "../ptx/wgmma.cuh"

namespace cuflash {

constexpr int kPanelColumns = 64;

// [rows, columns] of a 16-bit type. The columns are divided into equal parts that each begin a
// panel, so that a product can read one part as a whole matrix. The last panel of a part may extend
// beyond it (into the next part, or into zeros after the last one); no product reads that.
template <class T_, int rows_, int columns_, int parts = 1>
struct Panels {
  using T = T_;
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int part_columns = columns / parts;
  static constexpr int part_panels = (part_columns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int count = parts * part_panels;
  static constexpr int row_bytes = 128;
  static constexpr int panel_bytes = rows * row_bytes;
  static constexpr int bytes = count * panel_bytes;
  static_assert(sizeof(T) == 2 && rows % 8 == 0 && columns % parts == 0 && part_columns % 16 == 0,
                "whole swizzle patterns");

  // The column of the tensor at which a panel begins.
  __device__ static constexpr int first_column(int panel) {
    return panel / part_panels * part_columns + panel % part_panels * kPanelColumns;
  }
  // Byte offset of a column in the first row, whose chunks are not permuted.
  __device__ static constexpr int byte_of(int column) {
    const int within = column % part_columns;
    return (column / part_columns * part_panels + within / kPanelColumns) * panel_bytes +
           within % kPanelColumns * 2;
  }

  alignas(1024) T data[bytes / 2];
};

// Loads rows of one head into a matrix, beginning at `row`. Matrix::bytes bytes always arrive.
template <class Matrix>
__device__ inline void load_panels(Matrix& matrix, const void* map, unsigned barrier, int row,
                                   int head, int batch, unsigned long long policy) {
  const unsigned to = ptx::shared_address(matrix.data);
#pragma unroll
  for (int i = 0; i < Matrix::count; ++i) {
    ptx::tensor_load(to + i * Matrix::panel_bytes, map, barrier, Matrix::first_column(i), row, head,
                     batch, policy);
  }
}

// Matrix descriptors (PTX ISA "Matrix descriptor"): 14 bits of the address, then the leading and
// the stride offset, all in units of 16 bytes, and the swizzle.
constexpr unsigned long long kSwizzle128 = 1ull << 62;
constexpr unsigned long long kEightRows = static_cast<unsigned long long>(1024 / 16) << 32;

// A matrix as an operand whose depth runs along its columns; products take 16 of them at a time.
template <class Matrix>
struct DepthInColumns {
  unsigned long long base;
  __device__ explicit DepthInColumns(const Matrix& matrix)
      : base(kSwizzle128 | kEightRows | 1ull << 16 |
             (ptx::shared_address(matrix.data) & 0x3ffff) / 16) {}
  __device__ __forceinline__ unsigned long long at(int depth) const {
    return base + Matrix::byte_of(depth) / 16;
  }
};

// A matrix as an operand whose depth runs along its rows: it is read transposed, across the panels
// of a part.
template <class Matrix>
struct DepthInRows {
  unsigned long long base;
  __device__ explicit DepthInRows(const Matrix& matrix)
      : base(kSwizzle128 | kEightRows |
             static_cast<unsigned long long>(Matrix::panel_bytes / 16) << 16 |
             (ptx::shared_address(matrix.data) & 0x3ffff) / 16) {}
  __device__ __forceinline__ unsigned long long at(int depth) const {
    return base + depth * 128 / 16;
  }
};

}  // namespace cuflash
