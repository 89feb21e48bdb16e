// The accumulator of dQ in device memory, in the compute type. It holds fragments of fragment_rows
// x 8 as the warps hold them, contiguous over [batch, heads_q, padded_rows / fragment_rows,
// head_dim / 8], so that a warp adds to consecutive memory. Where one instruction adds all of a
// lane's elements of a fragment, they lie together; elsewhere one instruction adds one element of
// each lane, and the elements of all lanes lie together.
#pragma once

#include "../ptx/reduce.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Elements of a fragment that one lane holds: [row group][column of two].
template <class Tile>
constexpr int kLaneElements = Tile::row_groups * 2;

// Whether one instruction adds four float32 numbers.
template <class Config>
constexpr bool adds_four = sizeof(typename Config::Compute) == 4 && Config::architecture >= 90 &&
                           Config::fragment_rows == 16;

// Distance from one element of a lane to its next.
template <class Config>
constexpr int kElementStride = adds_four<Config> ? 1 : 32;

// Index of the first element that `lane` holds of the fragment at (row, column), both multiples of
// a fragment; the head's accumulator begins at row `head_row`. ByRows and ByFragments give the same
// number in two forms. In a kernel that uses all registers the form changes the code far beyond
// these few instructions, so each kernel keeps the form with which it was measured.
struct ByRows {
  template <class Config>
  __device__ static long long index(long long head_row, int row, int column, int lane) {
    const long long first = (head_row + row) * Config::head_dim + column * Config::fragment_rows;
    return first + lane * (adds_four<Config> ? Config::fragment_rows / 4 : 1);
  }
};
struct ByFragments {
  template <class Config>
  __device__ static long long index(long long head_row, int row, int column, int lane) {
    constexpr int lane_elements = Config::fragment_rows / 4;
    const long long fragment =
        (head_row + row) / Config::fragment_rows * (Config::head_dim / 8) + column / 8;
    if constexpr (adds_four<Config>) return (fragment * 32 + lane) * lane_elements;
    return fragment * 32 * lane_elements + lane;
  }
};

// Loads the tile whose first element is (row0, column0) of the accumulator.
template <class Config, class Counted, class Tile>
__device__ inline void load_from_accumulator(const typename Config::Compute* accumulator,
                                             Tile& tile, long long head_row, int row0,
                                             int column0) {
  constexpr int count = kLaneElements<Tile>;
  using Compute = typename Config::Compute;
  constexpr bool whole = adds_four<Config>;
  struct alignas(whole ? 16 : sizeof(Compute)) Elements {
    Compute x[whole ? count : 1];
  };
  const int lane = ptx::opaque_lane();
  const Compute* from =
      accumulator + Counted::template index<Config>(head_row, row0, column0, lane);
  constexpr int row_stride = Config::head_dim / 8 * 32 * count;
#pragma unroll
  for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::column_fragments; ++n) {
      constexpr int step = sizeof(Elements) / sizeof(Compute);
#pragma unroll
      for (int first = 0; first < count; first += step) {
        const Elements elements = *reinterpret_cast<const Elements*>(
            from + m * row_stride + n * 32 * count + first * kElementStride<Config>);
#pragma unroll
        for (int i = 0; i < step; ++i) {
          tile.value[m][n][(first + i) / 2][(first + i) % 2] = elements.x[i];
        }
      }
    }
  }
}

// Adds x to a lane's elements of a fragment, by one instruction where there is one.
template <class Config, class T, int count>
__device__ inline void add_all(T* to, const T (&x)[count]) {
  if constexpr (adds_four<Config>) {
    ptx::reduce_add_four(to, x);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) ptx::reduce_add(to + i * kElementStride<Config>, x[i]);
  }
}

// accumulator += tile, whose first element is (row0, column0). Adds zero to rows of the tile for
// which `dead(row)` is true.
template <class Config, class Counted, class Tile, class Dead>
__device__ inline void add_to_accumulator(typename Config::Compute* accumulator, const Tile& tile,
                                          long long head_row, int row0, int column0, Dead dead) {
  const int lane = ptx::opaque_lane();
  auto* to = accumulator + Counted::template index<Config>(head_row, row0, column0, lane);
  constexpr int row_stride = Config::head_dim / 8 * 32 * kLaneElements<Tile>;
#pragma unroll
  for (int m = 0; m < Tile::row_fragments; ++m) {
    bool skip[Tile::row_groups];
#pragma unroll
    for (int group = 0; group < Tile::row_groups; ++group) {
      skip[group] = dead(lane / 4 + Tile::row(m, group));
    }
#pragma unroll
    for (int n = 0; n < Tile::column_fragments; ++n) {
      typename Config::Compute x[kLaneElements<Tile>];
#pragma unroll
      for (int group = 0; group < Tile::row_groups; ++group) {
        x[group * 2] = skip[group] ? 0 : tile.value[m][n][group][0];
        x[group * 2 + 1] = skip[group] ? 0 : tile.value[m][n][group][1];
      }
      add_all<Config>(to + m * row_stride + n * 32 * kLaneElements<Tile>, x);
    }
  }
}

}  // namespace cuflash
