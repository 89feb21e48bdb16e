// FlashAttention-3 backward, gradients of keys in parts: where kv heads are few and groups large, a
// kv tile is the work of several blocks, each of which has a part of the group's query heads. To
// whoever counts blocks, tiles or query heads there are then `parts` times as many kv heads, see
// Fa3BackwardParams; only K and V are loaded, and dK and dV left, as said here.
//
// A block leaves its dK and dV in the workspace, in float32: fragments of 16 x 8 as the warps hold
// them, one after the other over [batch, heads_kv * parts, padded_keys / 16, columns / 8], so that
// a warp stores 512 consecutive bytes. Nobody waits for them: sum_parts.cu is a launch of its own.
#pragma once

#include "../ptx/opaque.cuh"
#include "../tile/warp_tile.cuh"
#include "backward_params.cuh"

namespace cuflash::fa3 {

constexpr int kRowsOfFragment = 16;

// What a lane holds of a fragment: [row group][which of two columns].
struct alignas(16) LaneFragment {
  float value[2][2];
};

// Where this lane's part of the fragment at (row, column) lies; rows count through all heads.
template <int columns>
__device__ inline long long part_index(long long row, int column) {
  const long long fragment = row / kRowsOfFragment * (columns / 8) + column / 8;
  return (fragment * 32 + ptx::opaque_lane()) * 4;
}

// The 16 rows of all columns that a warp has finished -> memory.
template <class Tile>
__device__ __forceinline__ void store_part(float* parts, const Tile& tile, long long row) {
  static_assert(Tile::rows == kRowsOfFragment, "one row of fragments");
  auto* const to = reinterpret_cast<LaneFragment*>(parts + part_index<Tile::columns>(row, 0));
#pragma unroll
  for (int n = 0; n < Tile::column_fragments; ++n) {
    const auto& groups = tile.value[0][n];
    to[n * 32] = {{{groups[0][0], groups[0][1]}, {groups[1][0], groups[1][1]}}};
  }
}

// Some of the columns of 16 rows <- memory.
template <int columns, class Tile>
__device__ __forceinline__ void load_part(Tile& tile, const float* parts, long long row,
                                          int column) {
  static_assert(Tile::rows == kRowsOfFragment, "one row of fragments");
  const auto* const from =
      reinterpret_cast<const LaneFragment*>(parts + part_index<columns>(row, column));
#pragma unroll
  for (int n = 0; n < Tile::column_fragments; ++n) {
    const LaneFragment fragment = from[n * 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.value[0][n][i / 2][i % 2] = fragment.value[i / 2][i % 2];
  }
}

// Zeros in `rows` rows, by `threads` threads.
template <int columns, int rows, int threads>
__device__ inline void clear_part(float* parts, long long row) {
  auto* const to = reinterpret_cast<LaneFragment*>(parts + row * columns);
  for (int i = threadIdx.x; i < rows * columns / 4; i += threads) to[i] = LaneFragment{};
}

}  // namespace cuflash::fa3
