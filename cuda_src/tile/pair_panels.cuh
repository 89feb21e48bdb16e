// A tile of an array with a number for every pair of a query and a key, in shared memory as the
// copy engine writes it: panels of 128 bytes of every row, with the 128-byte swizzle of
// tile/panels.cuh.
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/tensor_copy.cuh"
#include "numeric.cuh"
#include "pipeline.cuh"
#include "score.cuh"

namespace cuflash {

// [rows, columns] of elements of `itemsize` bytes.
template <int itemsize, int rows_, int columns>
struct PairPanels {
  static constexpr int rows = rows_;
  static constexpr int panel_columns = 128 / itemsize;
  static constexpr int count = (columns + panel_columns - 1) / panel_columns;
  static constexpr int panel_bytes = rows * 128;
  static constexpr int bytes = count * panel_bytes;
  static_assert(rows % 8 == 0, "whole swizzle patterns");
  alignas(1024) unsigned char data[bytes];
};

// Copies the box whose first element is (row, column) to the panels.
template <class Panels>
__device__ inline void load_pairs(Panels& panels, const void* map, unsigned barrier, int column,
                                  int row, int head, int batch, unsigned long long policy) {
  const unsigned to = ptx::shared_address(panels.data);
#pragma unroll
  for (int i = 0; i < Panels::count; ++i) {
    ptx::tensor_load(to + i * Panels::panel_bytes, map, barrier, column + i * Panels::panel_columns,
                     row, head, batch, policy);
  }
}

// A ring of tiles of a pair array that a term of the scores reads, and its barriers. It is empty
// where no term reads one.
template <class Config, bool = (Config::operand_stages > 0)>
struct OperandStorage {
  PairPanels<Config::operand_bytes, Config::operand_rows, Config::block_kv>
      operand[Config::operand_stages];
  Barrier operand_full[Config::operand_stages];
  Barrier operand_empty[Config::operand_stages];
};
template <class Config>
struct OperandStorage<Config, false> {};

// One thread initialises the barriers; `reading_warps` warps read a tile and arrive.
template <class Config>
__device__ inline void init_operand_barriers(OperandStorage<Config>& storage, int reading_warps) {
  if constexpr (Config::operand_stages > 0) {
    for (int stage = 0; stage < Config::operand_stages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&storage.operand_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&storage.operand_empty[stage]), reading_warps);
    }
  }
}

// One thread loads the tile that begins at query q_begin and key kv_begin into a stage that all
// warps have read.
template <class Config>
__device__ inline void load_operand_tile(OperandStorage<Config>& storage,
                                         const typename Config::Params& params, unsigned stage,
                                         int batch, int head, int q_begin, int kv_begin) {
  auto& full = storage.operand_full[stage];
  auto& panels = storage.operand[stage];
  arrive_expecting<Config>(full, sizeof(panels.data));
  const StagedPlace place = Config::Score::List::staged_place(params, batch, head);
  load_pairs(panels, place.map, ptx::shared_address(&full), kv_begin,
             Config::operand_rows == Config::block_q ? q_begin : 0, place.head, place.batch,
             place.policy);
}

// A lane's view of panels: reads elements (row + di, column + dj); di and dj are compile-time
// constants.
// - Rows of the panels are queries: di is a multiple of 8, dj a multiple of 8 or one more. A lane
// reads two neighbouring 32-bit elements at once. A warp reads sixteen rows and columns of 16-bit
// elements at once, when its lanes read the first of them, so all lanes read in the order of a
// WarpTile.
// - Rows of the panels are keys (`transposed`): di and dj change places.
// - Without `of_rows` only row 0 is read.
template <class T, bool of_rows>
struct PairReader {
  static constexpr int panel_columns = 128 / sizeof(T);
  static constexpr bool by_matrices = of_rows && sizeof(T) == 2;
  const unsigned char* data;
  int panel_bytes;
  unsigned first;  // of the lane, in bytes
  bool transposed;
  unsigned matrices;  // shared address of the matrix row that this lane gives
  mutable unsigned words[4];

  __device__ PairReader(const StagedLane& lane)
      : data(static_cast<const unsigned char*>(lane.panels)),
        panel_bytes(lane.panel_bytes),
        transposed(lane.transposed) {
    const int row = of_rows ? lane.row : 0;
    if (by_matrices && !transposed) {
      const int thread = static_cast<int>(threadIdx.x) % 32, of_warp = row / 16 * 16;
      matrices = ptx::shared_address(data) + (of_warp + thread % 16) * 128 +
                 (thread / 16 ^ thread % 8) * 16;
      return;
    }
    first = row * 128 + (lane.column % panel_columns * sizeof(T) ^ row % 8 * 16);
    if (transposed) data += lane.column / panel_columns * panel_bytes;
  }
  __device__ float at(int di, int dj) const {
    if (transposed) {  // in `first` the row's lowest bit and the column's bit of value 8 are 0
      const unsigned place = (first ^ di % 2 * 16 ^ dj * sizeof(T)) + di * 128;
      return to_compute(*reinterpret_cast<const T*>(data + place));
    }
    const unsigned within = dj / 8 * 8 % panel_columns * sizeof(T);
    const unsigned panel = dj / panel_columns * panel_bytes;
    if constexpr (by_matrices) {
      if (di == 0 && dj % 16 == 0) ptx::load_matrix_x4(words, (matrices ^ within) + panel);
      return half_of(T{}, words[dj / 8 % 2 * 2 + di / 8], dj % 2);
    } else if constexpr (sizeof(T) == 2) {
      const unsigned place = (first ^ within) + panel;
      return half_of(T{}, *reinterpret_cast<const unsigned*>(data + place), dj % 2);
    } else {
      const auto& both =
          *reinterpret_cast<const Pair<T>*>(data + (first ^ within) + panel + di * 128);
      return dj % 2 == 0 ? both.x : both.y;
    }
  }

 private:
  // One of two numbers that a single load reads. In other forms the compiler loads each separately.
  __device__ static float half_of(__nv_bfloat16, unsigned both, int which) {
    return __uint_as_float(which == 0 ? both << 16 : both & 0xffff0000u);
  }
  __device__ static float half_of(__half, unsigned both, int which) {
    const auto pair = __half22float2(*reinterpret_cast<const __half2*>(&both));
    return which == 0 ? pair.x : pair.y;
  }
};

}  // namespace cuflash
