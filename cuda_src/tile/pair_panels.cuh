// A tile of an array that has a number for every pair of a query and a key, in shared memory as the
// copy engine writes it: panels of 128 bytes of every row, with the 128-byte swizzle of
// tile/panels.cuh.
#pragma once

#include "../ptx/tensor_copy.cuh"
#include "numeric.cuh"
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

// The box whose first element is of this row and column -> panels.
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

// What a lane reads of panels: elements (row + di, column + dj), di a multiple of 8, dj of 8 or one
// more, both known to the compiler. Two neighbours lie side by side.
template <class T>
struct PairReader {
  const unsigned char* data;
  int panel_bytes;
  unsigned first;  // of the lane, in bytes

  __device__ PairReader(const StagedLane& lane, int row)
      : data(static_cast<const unsigned char*>(lane.panels)),
        panel_bytes(lane.panel_bytes),
        first(row * 128 + (lane.column * sizeof(T) ^ row % 8 * 16)) {}
  __device__ float at(int di, int dj) const {
    constexpr int panel_columns = 128 / sizeof(T);
    const unsigned within = dj / 8 * 8 % panel_columns * sizeof(T);
    const unsigned place = (first ^ within) + dj / panel_columns * panel_bytes + di * 128;
    if constexpr (sizeof(T) == 2) {
      return half_of(T{}, *reinterpret_cast<const unsigned*>(data + place), dj % 2);
    } else {
      const auto& both = *reinterpret_cast<const Pair<T>*>(data + place);
      return dj % 2 == 0 ? both.x : both.y;
    }
  }

 private:
  // One of two numbers that were loaded together: said otherwise, the compiler loads each alone.
  __device__ static float half_of(__nv_bfloat16, unsigned both, int which) {
    return __uint_as_float(which == 0 ? both << 16 : both & 0xffff0000u);
  }
  __device__ static float half_of(__half, unsigned both, int which) {
    const auto pair = __half22float2(*reinterpret_cast<const __half2*>(&both));
    return which == 0 ? pair.x : pair.y;
  }
};

}  // namespace cuflash
