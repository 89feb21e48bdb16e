// A warp's tile of 16-bit results to memory without shared memory: the four lanes of a row exchange
// what they hold until each has 16 bytes that lie together.
#pragma once

#include "numeric.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Word j of lane i becomes word i of lane j, among the four lanes of a row.
__device__ __forceinline__ void exchange_row_lanes(unsigned (&words)[4]) {
  const int lane = ptx::opaque_lane();
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      unsigned& low = words[i];
      unsigned& high = words[i + bit];
      const unsigned received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
      (upper ? low : high) = received;
    }
  }
}

// The tile, rounded to T -> rows of memory that start at multiples of 16 bytes, as far as rows and
// columns are valid; columns are valid by eights.
template <class Tile, class T>
__device__ __forceinline__ void store_exchanged(const Tile& tile, T* memory, long long row_stride,
                                                int valid_rows, int valid_columns) {
  static_assert(sizeof(T) == 2 && Tile::columns % 16 == 0, "");
  const int lane = ptx::opaque_lane();
  T* const to = memory + lane / 4 * row_stride + lane % 4 * 8;
#pragma unroll
  for (int n = 0; n < Tile::column_fragments; n += 4) {
#pragma unroll
    for (int group = 0; group < Tile::row_groups; ++group) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int fragment = n + i < Tile::column_fragments ? n + i : n;
        const float(&pair)[2] = tile.value[0][fragment][group];
        words[i] = pack(T{}, pair[0], pair[1]);
      }
      exchange_row_lanes(words);
      const bool valid = lane / 4 + 8 * group < valid_rows && n * 8 + lane % 4 * 8 < valid_columns;
      if (valid) {
        *reinterpret_cast<uint4*>(to + 8 * group * row_stride + n * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace cuflash
