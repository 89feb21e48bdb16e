// Products of float32 or float64 tiles by fused multiply-adds, in the register layout of the tensor
// cores' accumulators. Long sums are sums of short ones, as in a good BLAS, and keep the accuracy
// of their type. Each step sums 16 bytes of the depth and adds this sum to one of two accumulators
// in turn; a call adds both, once, to the caller's accumulators.
#pragma once

#include "numeric.cuh"
#include "operand.cuh"
#include "product_parts.cuh"
#include "shared_tile.cuh"
#include "warp_tile.cuh"

namespace cuflash {

template <class Element, int fragment_rows_>
struct ScalarProducts : ProductsByParts<ScalarProducts<Element, fragment_rows_>> {
  static constexpr int fragment_rows = fragment_rows_;
  static constexpr int step = 16 / static_cast<int>(sizeof(Element));  // depths loaded at a time

  // accumulators[i][j] += sum over depth of a(i, depth) * b(j, depth).
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply(Accumulators& accumulators, const A& a, const B& b) {
    // The number of columns at a time that keeps the pending sums in few registers.
    constexpr int most = Accumulators::row_fragments == 1   ? 4
                         : Accumulators::row_fragments == 2 ? 2
                                                            : 1;
    constexpr int width = largest_power_of_two_in(Accumulators::column_fragments, most);
    static_assert(depth % (2 * step) == 0, "the depth is whole pairs of 16-byte chunks");
    const LanePosition lane;
#pragma unroll
    for (int n0 = 0; n0 < Accumulators::column_fragments; n0 += width) {
      WarpTile<Element, fragment_rows, Accumulators::rows, width * 8> even, odd;
      even.fill(Element(0));
      odd.fill(Element(0));
#pragma unroll 1
      for (int k = 0; k < depth; k += 2 * step) {
        multiply_step(even, a, b, n0 * 8, k, lane);
        multiply_step(odd, a, b, n0 * 8, k + step, lane);
      }
      even.for_each([&](Element& x, int m, int n, int group, int which) {
        accumulators.value[m][n0 + n][group][which] += x + odd.value[m][n][group][which];
      });
    }
  }

  // accumulators[i][j] += sum over keys of weights[i][key] * b(j, key). The weights pass through
  // `scratch` [block_q, block_kv]; this warp owns its part at (row0, key0).
  template <class Accumulators, class Weights, class B, class Scratch>
  __device__ static void multiply_weights(Accumulators& accumulators, const Weights& weights,
                                          const B& b, const Scratch& scratch, int row0, int key0) {
    const LanePosition lane;
    __syncwarp();
    Weights::for_each_pair([&](int m, int n, int group) {
      Element* to = &scratch.at(row0 + lane.row + Weights::row(m, group),
                                key0 + lane.column + Weights::column(n));
      to[0] = weights.value[m][n][group][0];
      to[1] = weights.value[m][n][group][1];
    });
    __syncwarp();
    multiply<Weights::columns>(accumulators, rows_by_depth(scratch, row0, key0), b);
  }

 private:
  template <class Tile, class A, class B>
  __device__ static void multiply_step(Tile& sum, const A& a, const B& b, int column0, int k,
                                       const LanePosition& lane) {
    Element left[Tile::row_fragments][Tile::row_groups][step];
    Element right[Tile::column_fragments][2][step];
#pragma unroll
    for (int m = 0; m < Tile::row_fragments; ++m) {
#pragma unroll
      for (int group = 0; group < Tile::row_groups; ++group) {
        load(left[m][group], a, lane.row + Tile::row(m, group), k);
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::column_fragments; ++n) {
      load_two(right[n], b, column0 + lane.column + Tile::column(n), k);
    }
    sum.for_each([&](Element& x, int m, int n, int group, int which) {
      Element part = left[m][group][0] * right[n][which][0];
#pragma unroll
      for (int i = 1; i < step; ++i) part = fma(left[m][group][i], right[n][which][i], part);
      x += part;
    });
  }

  // Loads `step` elements along the depth of one row.
  template <class Tile, class Offset>
  __device__ static void load(Element (&d)[step], const RowsByDepth<Tile, Offset>& a, int row,
                              int k) {
    const Element* from = a.tile.chunk_at(a.row0 + row, (a.depth0 + k) / Tile::chunk);
    struct alignas(16) Vector {
      Element x[step];
    };
    const Vector v = *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < step; ++i) d[i] = v.x[i];
  }
  template <class Tile, class Offset>
  __device__ static void load(Element (&d)[step], const DepthByRows<Tile, Offset>& a, int row,
                              int k) {
#pragma unroll
    for (int i = 0; i < step; ++i) d[i] = a.tile.at(a.depth0 + k + i, a.row0 + row);
  }

  // Loads the same of rows `row` and `row + 1`; `row` is even.
  template <class Tile, class Offset>
  __device__ static void load_two(Element (&d)[2][step], const RowsByDepth<Tile, Offset>& b,
                                  int row, int k) {
    load(d[0], b, row, k);
    load(d[1], b, row + 1, k);
  }
  template <class Tile, class Offset>
  __device__ static void load_two(Element (&d)[2][step], const DepthByRows<Tile, Offset>& b,
                                  int row, int k) {
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const Pair<Element> v =
          *reinterpret_cast<const Pair<Element>*>(&b.tile.at(b.depth0 + k + i, b.row0 + row));
      d[0][i] = v.x;
      d[1][i] = v.y;
    }
  }
};

}  // namespace cuflash
