// Products of float32 tiles on the tensor cores, with the accuracy of float32: three tf32 products
// for each. x = high + low, where high is x rounded to tf32; x * y is high * high + high * low +
// low * high. The difference x - high is exact. The instruction truncates low to its upper 11 bits,
// which errs by at most 2^-23 of x, with either sign. The omitted low * low is at most 2^-22 of x *
// y, also with either sign.
//
// The tensor cores truncate when they add, so a long sum is biased. Every call therefore sums in
// its own accumulators and adds them in float32 to the caller's: the sum of high * high after every
// `chunk` of the depth, the sum of the small products once. Both cover a few columns at a time.
//
// Where x is infinite `low` is NaN, so the small products count only where the sum of the large
// ones is finite. |x| above (1 - 2^-12) 2^128 counts as infinite.
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"
#include "../ptx/tf32.cuh"
#include "depth_pairs.cuh"
#include "numeric.cuh"
#include "operand.cuh"
#include "product_parts.cuh"
#include "shared_tile.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Divides `length` into as few equal parts as possible, each of whole steps and of at most `most`;
// returns the length of a part.
__device__ constexpr int equal_part(int length, int step, int most) {
  int parts = (length + most - 1) / most;
  while (length % (parts * step) != 0) ++parts;
  return length / parts;
}

// architecture: 90 is sm_90. From sm_90 on, one instruction rounds to tf32.
template <int architecture>
struct Tf32Products : ProductsByParts<Tf32Products<architecture>> {
  static constexpr int fragment_rows = 16;
  static constexpr int chunk = 64;  // depths summed before they are added
  // Registers of a lane for the large and for the small pending sums, with fewer where split
  // weights take registers too; and registers for the split weights.
  static constexpr int sum_registers = 32;
  static constexpr int sum_registers_by_weights = 16;
  static constexpr int weight_registers = 64;

  // accumulators[i][j] += sum over depth of a(i, depth) * b(j, depth).
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply(Accumulators& accumulators, const A& a, const B& b) {
    constexpr int step = depth_along_rows<A, B> ? 16 : 8;
    static_assert(depth % step == 0, "the depth is whole steps");
    constexpr int part = equal_part(depth, step, chunk);
    constexpr int unrolled = 2;  // 3 or more start more loads than the registers can hold
    constexpr int columns = width<Accumulators, sum_registers>;
    const int lane = ptx::opaque_lane();
    const auto left = left_of<step>(a, lane);
    const auto right = right_of<step>(b, lane);
#pragma unroll
    for (int n0 = 0; n0 < Accumulators::column_fragments; n0 += columns) {
      Sums<Accumulators, sum_registers> sums;
      sums.small.fill(0.0f);
#pragma unroll 1
      for (int k0 = 0; k0 < depth; k0 += part) {
        sums.large.fill(0.0f);
#pragma unroll(unrolled)
        for (int k = 0; k < part; k += step) multiply_step<step>(sums, left, right, n0 * 8, k0 + k);
        add_large(accumulators, sums, n0);
      }
      add_small(accumulators, sums, n0);
    }
  }

  // accumulators[i][j] += sum over keys of weights[i][key] * b(j, key). An accumulator is a left
  // operand without any change (see depth_pairs.cuh). As many keys as the registers can hold are
  // split once, for all columns.
  template <class Accumulators, class Weights, class B, class Scratch>
  __device__ static void multiply_weights(Accumulators& accumulators, const Weights& weights,
                                          const B& b, const Scratch&, int, int) {
    constexpr int rows = Accumulators::row_fragments;
    constexpr int keys = equal_part(Weights::columns, 8, weight_registers / rows);
    constexpr int columns = width<Accumulators, sum_registers_by_weights>;
    const DepthPairs<B> right(b, ptx::opaque_lane());
#pragma unroll
    for (int k0 = 0; k0 < Weights::columns; k0 += keys) {
      Split<4> left[keys / 8][rows];
      split_weights(left, weights, k0);
#pragma unroll
      for (int n0 = 0; n0 < Accumulators::column_fragments; n0 += columns) {
        Sums<Accumulators, sum_registers_by_weights> sums;
        sums.large.fill(0.0f);
        sums.small.fill(0.0f);
#pragma unroll
        for (int s = 0; s < keys / 8; ++s) {
          multiply_columns<8>(sums, &left[s], right, n0 * 8, k0 + s * 8);
        }
        add_large(accumulators, sums, n0);
        add_small(accumulators, sums, n0);
      }
    }
  }

 private:
  template <int count>
  struct Split {
    float high[count];
    float low[count];
  };
  template <int count>
  __device__ static void split(Split<count>& to, const float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if constexpr (architecture >= 90) {
        to.high[i] = ptx::round_to_tf32(x[i]);
      } else {
        to.high[i] = ptx::round_to_tf32_by_integers(x[i]);
      }
      to.low[i] = x[i] - to.high[i];
    }
  }
  template <int steps, int rows, class Weights>
  __device__ static void split_weights(Split<4> (&left)[steps][rows], const Weights& weights,
                                       int k0) {
#pragma unroll
    for (int i = 0; i < steps * rows; ++i) {
      const auto& x = weights.value[i % rows][k0 / 8 + i / rows];
      split(left[i / rows][i % rows], {x[0][0], x[1][0], x[0][1], x[1][1]});
    }
  }

  // The number of column fragments that are summed at a time.
  template <class Accumulators, int registers>
  static constexpr int width = largest_power_of_two_in(Accumulators::column_fragments,
                                                       registers / 4 / Accumulators::row_fragments);

  template <class Accumulators, int registers>
  struct Sums {
    static constexpr int columns = width<Accumulators, registers> * 8;
    using Tile = WarpTile<float, fragment_rows, Accumulators::rows, columns>;
    Tile large;  // of high * high
    Tile small;  // of high * low and low * high
  };

  template <class Accumulators, class Sums>
  __device__ static void add_large(Accumulators& to, Sums& sums, int n0) {
    sums.large.for_each([&](float& x, int m, int n, int group, int which) {
      to.value[m][n0 + n][group][which] += x;
    });
  }
  template <class Accumulators, class Sums>
  __device__ static void add_small(Accumulators& to, Sums& sums, int n0) {
    sums.small.for_each([&](float& x, int m, int n, int group, int which) {
      float& total = to.value[m][n0 + n][group][which];
      if (fabsf(total) < infinity<float>()) total += x;
    });
  }

  // Steps of 16 are used where both operands have the depth along their rows. Two 8x4 matrices of
  // ldmatrix hold 8 rows of a step of 8, in the instruction's own order of the depth.
  // Left: matrices 0 and 1 are rows 0-7 and 8-15 of depths 0-3, matrices 2 and 3 of depths 4-7.
  // Right: matrices 0 to 3 are 8 rows of depths 0-3 to 12-15. Steps of 8 use DepthPairs.
  template <int step, class A>
  __device__ static auto left_of(const A& a, int lane) {
    if constexpr (step == 16) {
      return LaneChunks<typename A::Tile, is_aligned<decltype(a.depth0)>>{
          a.tile, a.row0 + lane % 16, a.depth0 / 4 + lane / 16};
    } else {
      return DepthPairs<A>(a, lane);
    }
  }
  template <int step, class B>
  __device__ static auto right_of(const B& b, int lane) {
    if constexpr (step == 16) {
      return LaneChunks<typename B::Tile, is_aligned<decltype(b.depth0)>>{b.tile, b.row0 + lane % 8,
                                                                          b.depth0 / 4 + lane / 8};
    } else {
      return DepthPairs<B>(b, lane);
    }
  }

  // Loads the 16x8 block of the left operand at (row, k).
  template <int step, class Left>
  __device__ static void load_left(Split<4>& to, const Left& left, int row, int k) {
    float x[4];
    if constexpr (step == 16) {
      ptx::load_matrix_x4(x, left.at(row, k / 4));
    } else {
      float near[2], far[2];
      left.load(near, row, k);
      left.load(far, row + 8, k);
      x[0] = near[0];
      x[1] = far[0];
      x[2] = near[1];
      x[3] = far[1];
    }
    split(to, x);
  }
  // Loads 8 rows and one step of the depth of the right operand at (row, k).
  template <int step, class Right>
  __device__ static void load_right(Split<2> (&to)[step / 8], const Right& right, int row, int k) {
    if constexpr (step == 16) {
      float x[4];
      ptx::load_matrix_x4(x, right.at(row, k / 4));
      split(to[0], {x[0], x[1]});
      split(to[1], {x[2], x[3]});
    } else {
      float x[2];
      right.load(x, row, k);
      split(to[0], x);
    }
  }

  template <int step, class Sums, class Left, class Right>
  __device__ static void multiply_step(Sums& sums, const Left& left, const Right& right,
                                       int column0, int k) {
    constexpr int rows = Sums::Tile::row_fragments;
    Split<4> fragments[step / 8][rows];
#pragma unroll
    for (int i = 0; i < step / 8 * rows; ++i) {
      load_left<step>(fragments[i / rows][i % rows], left, i % rows * 16, k + i / rows * 8);
    }
    multiply_columns<step>(sums, fragments, right, column0, k);
  }

  // The same with the left operand's blocks in registers: left[s][m].
  template <int step, class Sums, class Right>
  __device__ static void multiply_columns(Sums& sums,
                                          const Split<4> (*left)[Sums::Tile::row_fragments],
                                          const Right& right, int column0, int k) {
    constexpr int rows = Sums::Tile::row_fragments;
#pragma unroll
    for (int n = 0; n < Sums::Tile::column_fragments; ++n) {
      Split<2> fragments[step / 8];
      load_right<step>(fragments, right, column0 + n * 8, k);
#pragma unroll
      for (int s = 0; s < step / 8; ++s) {
        const Split<2>& b = fragments[s];
#pragma unroll
        for (int m = 0; m < rows; ++m) {
          ptx::mma_m16n8k8(sums.small.value[m][n], left[s][m].low, b.high);
          ptx::mma_m16n8k8(sums.large.value[m][n], left[s][m].high, b.high);
          ptx::mma_m16n8k8(sums.small.value[m][n], left[s][m].high, b.low);
        }
      }
    }
  }
};

}  // namespace cuflash
