// Products of float64 tiles on the tensor cores. The tensor cores add as fused multiply-adds do, so
// a sum may be of any length.
#pragma once

#include "../ptx/load_shared.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"
#include "depth_pairs.cuh"
#include "operand.cuh"
#include "product_parts.cuh"
#include "shared_tile.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// mma_depth: 4 is m8n8k4 (sm_80); 8 and 16 are m16n8k8 and m16n8k16 (sm_90), which use the same
// registers for more products.
template <int mma_depth>
struct Fp64Products : ProductsByParts<Fp64Products<mma_depth>> {
  static constexpr int fragment_rows = mma_depth == 4 ? 8 : 16;

  // accumulators[i][j] += sum over depth of a(i, depth) * b(j, depth).
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply(Accumulators& accumulators, const A& a, const B& b) {
    static_assert(depth % 8 == 0, "the depth is whole steps of 8");
    const int lane = ptx::opaque_lane();
    constexpr bool spread = depth_along_row<A> && depth % 16 == 0;
    const auto left = fragments_of<spread>(a, lane);
    const auto right = fragments_of<spread>(b, lane);
    constexpr int steps = spread || mma_depth == 16 ? 2 : 1;
    constexpr int whole = depth / (steps * 8) * (steps * 8);
#pragma unroll(8)
    for (int k = 0; k < whole; k += steps * 8) multiply_steps<steps>(accumulators, left, right, k);
    if constexpr (whole < depth) multiply_steps<1>(accumulators, left, right, whole);
  }

  // accumulators[i][j] += sum over keys of weights[i][key] * b(j, key). An accumulator is a left
  // operand without any change (see depth_pairs.cuh).
  template <class Accumulators, class Weights, class B, class Scratch>
  __device__ static void multiply_weights(Accumulators& accumulators, const Weights& weights,
                                          const B& b, const Scratch&, int, int) {
    const DepthPairs<B> right(b, ptx::opaque_lane());
    constexpr int steps = mma_depth == 16 ? 2 : 1;
    constexpr int whole = Weights::columns / (steps * 8) * (steps * 8);
#pragma unroll
    for (int k = 0; k < whole; k += steps * 8) {
      multiply_weight_steps<steps>(accumulators, weights, right, k);
    }
    if constexpr (whole < Weights::columns) {
      multiply_weight_steps<1>(accumulators, weights, right, whole);
    }
  }

 private:
  static constexpr int groups = fragment_rows / 8;

  // A lane's elements of the left operand in a step of 8: two depths of its one row, if a fragment
  // has 8 rows, or of its two rows, if it has 16.
  struct Left {
    double rows[groups][2];
  };

  // Where the left operand has the depth along its rows, a lane loads one number at a time. Two
  // numbers that lie side by side belong to one row and two depths, but the instruction takes two
  // rows of one depth in neighbouring registers, so a wider load would need moves.
  //
  // In step s = 0 or 1 lane l then gives depth (3 * (l % 2) + 12 * (l / 2 % 2)) ^ (4 * s + i) as
  // number i. Bits 1 and 2 differ among the four lanes of a row, so that down the columns of a tile
  // they read rows of different permutations. Bits 0 and 3 differ too, so that along its rows four
  // lanes of each of four rows, a half-warp, read both halves of all eight chunks of a line. No two
  // lanes meet in a bank either way.
  static constexpr int spread_depths = 16;
  __device__ static int spread_depth(int lane, int s, int i) {
    return (lane % 2 * 3 + lane / 2 % 2 * 12) ^ (4 * s + i);
  }
  template <class Tile, class Offset>
  using ChunksOf = LaneChunks<Tile, is_aligned<Offset>>;
  template <class Tile, class Offset>
  __device__ static ChunksOf<Tile, Offset> chunks_of(const RowsByDepth<Tile, Offset>& operand,
                                                     int lane, int depth) {
    return {operand.tile, operand.row0 + lane / 4, operand.depth0 / 2 + depth / 2, depth % 2 * 8};
  }
  template <class Tile, class Offset>
  __device__ static ChunksOf<Tile, Offset> chunks_of(const DepthByRows<Tile, Offset>& operand,
                                                     int lane, int depth) {
    return {operand.tile, operand.depth0 + depth, operand.row0 / 2 + lane / 8, lane / 4 % 2 * 8};
  }
  template <class Tile, class Offset>
  __device__ static unsigned address(const RowsByDepth<Tile, Offset>&,
                                     const ChunksOf<Tile, Offset>& chunks, int row, int k) {
    return chunks.at(row, k / 2);
  }
  template <class Tile, class Offset>
  __device__ static unsigned address(const DepthByRows<Tile, Offset>&,
                                     const ChunksOf<Tile, Offset>& chunks, int row, int k) {
    return chunks.at(k, row / 2);
  }
  // load() is the same as that of DepthPairs.
  template <class Operand>
  struct SpreadDepths {
    using Chunks = decltype(chunks_of(*static_cast<const Operand*>(nullptr), 0, 0));
    const Operand& operand;
    Chunks chunks[2][2];  // [step][number]
    __device__ SpreadDepths(const Operand& operand, int lane)
        : operand(operand),
          chunks{{chunks_of(operand, lane, spread_depth(lane, 0, 0)),
                  chunks_of(operand, lane, spread_depth(lane, 0, 1))},
                 {chunks_of(operand, lane, spread_depth(lane, 1, 0)),
                  chunks_of(operand, lane, spread_depth(lane, 1, 1))}} {}
    __device__ void load(double (&d)[2], int row, int k) const {
      const int far = k / spread_depths * spread_depths;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::load_shared(d[i], address(operand, chunks[k / 8 % 2][i], row, far));
      }
    }
  };
  template <bool spread, class Operand>
  __device__ static auto fragments_of(const Operand& operand, int lane) {
    if constexpr (spread) {
      return SpreadDepths<Operand>(operand, lane);
    } else {
      return DepthPairs<Operand>(operand, lane);
    }
  }

  template <int steps, class Accumulators, class LeftPairs, class RightPairs>
  __device__ static void multiply_steps(Accumulators& accumulators, const LeftPairs& pairs,
                                        const RightPairs& right, int k) {
    Left left[steps][Accumulators::row_fragments];
#pragma unroll
    for (int s = 0; s < steps; ++s) {
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) {
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          pairs.load(left[s][m].rows[group], Accumulators::row(m, group), k + s * 8);
        }
      }
    }
    multiply_columns(accumulators, left, right, k);
  }

  template <int steps, class Accumulators, class Weights, class RightPairs>
  __device__ static void multiply_weight_steps(Accumulators& accumulators, const Weights& weights,
                                               const RightPairs& right, int k) {
    Left left[steps][Accumulators::row_fragments];
#pragma unroll
    for (int s = 0; s < steps; ++s) {
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) {
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          left[s][m].rows[group][0] = weights.value[m][k / 8 + s][group][0];
          left[s][m].rows[group][1] = weights.value[m][k / 8 + s][group][1];
        }
      }
    }
    multiply_columns(accumulators, left, right, k);
  }

  template <int steps, int rows, class Accumulators, class RightPairs>
  __device__ static void multiply_columns(Accumulators& accumulators,
                                          const Left (&left)[steps][rows], const RightPairs& right,
                                          int k) {
#pragma unroll
    for (int n = 0; n < Accumulators::column_fragments; ++n) {
      double pairs[steps][2];
#pragma unroll
      for (int s = 0; s < steps; ++s) right.load(pairs[s], n * 8, k + s * 8);
      if constexpr (mma_depth == 16 && steps == 2) {
#pragma unroll
        for (int m = 0; m < rows; ++m) {
          mma(accumulators.value[m][n], left[0][m], left[1][m], pairs[0], pairs[1]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < steps * rows; ++i) {
          mma(accumulators.value[i % rows][n], left[i / rows][i % rows], pairs[i / rows]);
        }
      }
    }
  }

  __device__ static void mma(double (&c)[1][2], const Left& a, const double (&b)[2]) {
    ptx::mma_m8n8k4(c, a.rows[0][0], b[0]);
    ptx::mma_m8n8k4(c, a.rows[0][1], b[1]);
  }
  __device__ static void mma(double (&c)[2][2], const Left& a, const double (&b)[2]) {
    ptx::mma_m16n8k8(c, {a.rows[0][0], a.rows[1][0], a.rows[0][1], a.rows[1][1]}, b);
  }
  __device__ static void mma(double (&c)[2][2], const Left& a0, const Left& a1,
                             const double (&b0)[2], const double (&b1)[2]) {
    ptx::mma_m16n8k16(c,
                      {a0.rows[0][0], a0.rows[1][0], a0.rows[0][1], a0.rows[1][1], a1.rows[0][0],
                       a1.rows[1][0], a1.rows[0][1], a1.rows[1][1]},
                      {b0[0], b0[1], b1[0], b1[1]});
  }
};

}  // namespace cuflash
