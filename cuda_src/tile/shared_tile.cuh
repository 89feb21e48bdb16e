// A matrix in shared memory: rows of 16-byte chunks, the chunks of a row permuted so that eight
// rows of one chunk column lie in eight different bank groups (what ldmatrix and the fragment
// accesses read together).
#pragma once

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
  // Chunks change places inside groups of this many; as many rows share one 128-byte line as the
  // group is smaller than the eight chunks of a line.
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

// Shared memory of `count` elements, aligned for every access; an unused array keeps one line so
// that the host can add up the same bytes.
template <class T, int count>
struct SharedArray {
  static constexpr int line = 128 / static_cast<int>(sizeof(T));
  alignas(128) T data[count > line ? count : line];
};

}  // namespace cuflash
