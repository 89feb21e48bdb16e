// A matrix in shared memory: rows of 16-byte chunks. The chunks of a row are permuted so that eight
// rows of one chunk column lie in eight different bank groups, because ldmatrix and the fragment
// accesses read these together.
#pragma once

#include "../ptx/load_matrix.cuh"

namespace cuflash {

__device__ constexpr int largest_power_of_two_in(int n, int cap) {
  int power = 1;
  while (power < cap && n % (2 * power) == 0) power *= 2;
  return power;
}

// [rows_, columns_] of T; columns_ * sizeof(T) is a multiple of 16.
template <class T, int rows_, int columns_>
struct SharedTile {
  using Element = T;
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int chunk = 16 / static_cast<int>(sizeof(T));  // elements of 16 bytes
  static constexpr int chunks = columns / chunk;
  // Chunks are permuted inside groups of this many. Where a group is smaller than the eight chunks
  // of a 128-byte line, several rows share a line.
  static constexpr int group = largest_power_of_two_in(chunks, 8);
  static constexpr int rows_per_line = 8 / group;
  static_assert(columns % chunk == 0, "a row must be whole 16-byte chunks");

  T* data;

  __device__ T* chunk_at(int row, int chunk_index) const {
    const int permuted = chunk_index ^ ((row / rows_per_line) & (group - 1));
    return data + (row * chunks + permuted) * chunk;
  }

  __device__ T& at(int row, int column) const {
    return chunk_at(row, column / chunk)[column % chunk];
  }
};

// One thread clears a row.
template <class Tile>
__device__ inline void clear_row(const Tile& tile, int row) {
  for (int i = 0; i < Tile::columns; ++i) tile.at(row, i) = typename Tile::Element(0.0f);
}

// The chunks of a tile that a lane reads. at(rows, chunks) is the shared-window address `bytes`
// bytes into chunk (row + rows, chunk + chunks). `rows` and `chunks` are compile-time constants;
// modulo 8, `rows` shares no bit with the lane's own row. With `aligned` the same holds for the
// chunks: the permutation is then an exclusive or with a constant, and one register serves all
// addresses.
template <class Tile, bool aligned>
struct LaneChunks {
  Tile tile;
  int row;
  int chunk;
  int bytes = 0;
  __device__ unsigned at(int rows, int chunks) const {
    return ptx::shared_address(tile.chunk_at(row + rows, chunk + chunks)) + bytes;
  }
};
template <class Tile>
struct LaneChunks<Tile, true> {
  unsigned address;
  __device__ LaneChunks(const Tile& tile, int row, int chunk, int bytes = 0)
      : address(ptx::shared_address(tile.chunk_at(row, chunk)) + bytes) {}
  __device__ unsigned at(int rows, int chunks) const {
    constexpr int group = Tile::group;
    const int permuted = (chunks ^ (rows / Tile::rows_per_line)) & (group - 1);
    return (address ^ (permuted * 16)) + (rows * Tile::chunks + (chunks & ~(group - 1))) * 16;
  }
};

// Shared memory of `count` elements, aligned for every access. An unused array keeps one line, so
// that the host's sum of the bytes is the same.
template <class T, int count>
struct SharedArray {
  static constexpr int line = 128 / static_cast<int>(sizeof(T));
  alignas(128) T data[count > line ? count : line];
};

}  // namespace cuflash
