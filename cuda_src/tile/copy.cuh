// Copies of tiles from global to shared memory. Rows and columns beyond the valid ones become
// zeros, so that no product reads what memory holds there.
#pragma once

#include "../ptx/async_copy.cuh"
#include "../ptx/opaque.cuh"

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

// One thread copies 16 bytes, or writes zeros if they are not `valid`.
template <CopyKind kind>
__device__ inline void copy_chunk(void* to, const void* from, bool valid) {
  if constexpr (kind == CopyKind::asynchronous) {
    ptx::async_copy_16(ptx::shared_address(to), from, valid ? 16 : 0);
  } else {
    *static_cast<Chunk*>(to) = valid ? *static_cast<const Chunk*>(from) : Chunk{};
  }
}

// One thread copies 16 bytes if they are `wanted`; asynchronous copies do this without a branch.
template <CopyKind kind>
__device__ inline void copy_chunk_if(bool wanted, void* to, const void* from) {
  if constexpr (kind == CopyKind::asynchronous) {
    ptx::async_copy_16_if(wanted, ptx::shared_address(to), from, 16);
  } else if (wanted) {
    *static_cast<Chunk*>(to) = *static_cast<const Chunk*>(from);
  }
}

// The largest power of two of rows that `threads` threads copy at a time, one chunk each; at least
// one. The distance between a thread's rows in shared memory is then a compile-time constant.
__device__ constexpr int rows_at_a_time(int chunks, int threads) {
  int rows = 1;
  while (2 * rows * chunks <= threads) rows *= 2;
  return rows;
}

// A thread copies every row_step-th row of one column of chunks, or of several columns where a row
// has more chunks than there are threads. Threads beyond row_step rows are idle.
template <CopyKind kind, int threads, bool whole, class Tile>
__device__ inline void copy_chunks(const Tile& tile, const typename Tile::Element* source,
                                   long long row_stride, int valid_rows, int valid_columns,
                                   int thread) {
  constexpr int row_step = rows_at_a_time(Tile::chunks, threads);
  const int first_row = Tile::chunks <= threads ? thread / Tile::chunks : 0;
  const int first_chunk = Tile::chunks <= threads ? thread % Tile::chunks : thread;
  if (first_row >= row_step) return;
#pragma unroll
  for (int chunks_on = 0; chunks_on < Tile::chunks; chunks_on += threads) {
    const int chunk = first_chunk + chunks_on;
    if (Tile::chunks > threads && chunk >= Tile::chunks) break;
    const bool valid_column = chunk * Tile::chunk < valid_columns;
    const typename Tile::Element* from = source + first_row * row_stride + chunk * Tile::chunk;
#pragma unroll 4
    for (int row = 0; row < Tile::rows; row += row_step) {
      if (Tile::rows % row_step != 0 && row + first_row >= Tile::rows) break;
      const bool valid = whole || (valid_column && row + first_row < valid_rows);
      copy_chunk<kind>(tile.chunk_at(row + first_row, chunk), valid ? from : source, valid);
      from += row_step * row_stride;
    }
  }
}

// Copies `tile` from `source`, whose rows lie `row_stride` elements apart. `threads` threads take
// part; this is number `thread`. The caller commits asynchronous copies and waits for them.
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
  } else if (valid_rows >= Tile::rows && valid_columns > Tile::columns - Tile::chunk) {
    copy_chunks<kind, threads, true>(tile, source, row_stride, valid_rows, valid_columns, thread);
  } else {
    copy_chunks<kind, threads, false>(tile, source, row_stride, valid_rows, valid_columns, thread);
  }
}

// The direction in which a block visits the tiles of a tensor: each tile begins where the last one
// ended.
enum class Direction { up, down };

// The tiles of one tensor that a block visits in turn, and the address of the next one. Where all
// threads copy alike there is no branch, so the compiler can interleave the copies with other
// instructions.
template <CopyKind kind, int threads, Direction direction, class Tile>
struct TileStream {
  using Element = typename Tile::Element;
  static constexpr int row_step = rows_at_a_time(Tile::chunks, threads);
  // Whether every thread copies the same number of chunks, all of one column.
  static constexpr bool even = kind == CopyKind::asynchronous && Tile::chunks <= threads &&
                               threads == row_step * Tile::chunks && Tile::rows % row_step == 0;
  long long row_stride;
  int columns;
  // Row 0 of the next tile; where copies are even, this thread's first chunk of it. It is opaque,
  // so that the compiler keeps it as one value and does not recompute it at each use.
  const Element* next;

  // `source` is row 0 of the first tile.
  __device__ TileStream(const Element* source, long long row_stride, int columns)
      : row_stride(row_stride), columns(columns), next(source) {
    if constexpr (even) {
      next = ptx::opaque(source + (row() + first_row) * row_stride + chunk() * Tile::chunk);
    }
  }

  // Copies the next tile to `tile`, if there is one, and advances. `whole` says that all its rows
  // are valid.
  template <bool whole = false>
  __device__ void load(const Tile& tile, bool exists, int valid_rows) {
    if constexpr (even) {
      load_even<whole>(tile, exists, valid_rows);
    } else {
      if (whole) valid_rows = Tile::rows;
      if (exists) copy_tile<kind, threads>(tile, next, row_stride, valid_rows, columns);
      next += (up ? Tile::rows : -Tile::rows) * row_stride;
    }
  }

  // Moves the next tile by so many elements.
  __device__ void move(long long elements) { next += elements; }

 private:
  static constexpr bool up = direction == Direction::up;
  static constexpr int first_row = up ? 0 : Tile::rows - row_step;
  __device__ static int row() { return static_cast<int>(threadIdx.x) / Tile::chunks; }
  __device__ static int chunk() { return static_cast<int>(threadIdx.x) % Tile::chunks; }

  // Reads nothing where a chunk is not valid: its address may lie outside of the tensor.
  template <bool whole>
  __device__ void load_even(const Tile& tile, bool exists, int valid_rows) {
    const bool column = chunk() * Tile::chunk < columns;
    // Rows eight apart have the same permutation, so their distance is a compile-time constant.
    constexpr bool apart = row_step % 8 == 0;
    const unsigned to = ptx::opaque(ptx::shared_address(tile.chunk_at(row(), chunk())));
#pragma unroll
    for (int i = 0; i < Tile::rows; i += row_step) {
      const int rows = up ? i : first_row - i;
      const bool valid = column && (whole || row() + rows < valid_rows);
      const unsigned place = apart ? to + rows * Tile::chunks * 16
                                   : ptx::shared_address(tile.chunk_at(row() + rows, chunk()));
      ptx::async_copy_16_if(exists, place, next, valid ? 16 : 0);
      // Opaque: the compiler adds to the previous address; it does not multiply from the first one.
      next = ptx::opaque(next + (up ? row_step : -row_step) * row_stride);
    }
  }
};

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
