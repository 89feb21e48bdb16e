// Copies of tiles from global to shared memory. Rows and columns beyond the valid ones become
// zeros, so that what lies there in memory never reaches a product.
#pragma once

#include "../ptx/async_copy.cuh"

namespace cuflash {

// How a kernel's tiles are copied, one choice for a translation unit.
enum class CopyKind {
  asynchronous,  // 16-byte cp.async (sm_80): aligned rows, whole chunks
  vector,        // 16-byte loads and stores: the same where there is no cp.async
  element,       // one element at a time: any alignment, any head_dim
};

struct alignas(16) Chunk {
  unsigned words[4];
};

// Copies `tile` from `source`, whose rows lie `row_stride` elements apart, with `threads` threads
// of which this is number `thread`. Asynchronous copies still have to be committed and waited for.
template <CopyKind kind, int threads, class Tile>
__device__ inline void copy_tile(const Tile& tile, const typename Tile::Element* source,
                                 long long row_stride, int valid_rows, int valid_columns,
                                 int thread = threadIdx.x) {
  using T = typename Tile::Element;
  if constexpr (kind == CopyKind::element) {
    for (int i = thread; i < Tile::rows * Tile::columns; i += threads) {
      const int row = i / Tile::columns;
      const int column = i % Tile::columns;
      const bool valid = row < valid_rows && column < valid_columns;
      tile.at(row, column) = valid ? source[row * row_stride + column] : T(0.0f);
    }
  } else {
    for (int i = thread; i < Tile::rows * Tile::chunks; i += threads) {
      const int row = i / Tile::chunks;
      const int chunk = i % Tile::chunks;
      const bool valid = row < valid_rows && chunk * Tile::chunk < valid_columns;
      const T* from = source + (valid ? row * row_stride + chunk * Tile::chunk : 0);
      T* to = tile.chunk_at(row, chunk);
      if constexpr (kind == CopyKind::asynchronous) {
        ptx::async_copy_16(to, from, valid ? 16 : 0);
      } else {
        *reinterpret_cast<Chunk*>(to) = valid ? *reinterpret_cast<const Chunk*>(from) : Chunk{};
      }
    }
  }
}

// Ends a group of copies.
template <CopyKind kind>
__device__ inline void commit_copies() {
  if constexpr (kind == CopyKind::asynchronous) ptx::async_copy_commit();
}

// Waits until at most the `pending` latest groups of this thread are under way; a barrier must
// follow before another thread reads what was copied.
template <CopyKind kind, int pending>
__device__ inline void wait_copies() {
  if constexpr (kind == CopyKind::asynchronous) ptx::async_copy_wait<pending>();
}

}  // namespace cuflash
