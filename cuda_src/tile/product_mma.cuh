// Products of 16-bit tiles on the tensor cores, float32 accumulators: mma.sync fed by ldmatrix.
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"
#include "numeric.cuh"
#include "operand.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// mma_depth: 16 where m16n8k16 exists (sm_80), 8 where only m16n8k8 does (sm_75).
template <class Element, int mma_depth>
struct TensorCoreProducts {
  static constexpr int fragment_rows = 16;

  // accumulators[i][j] += sum over depth of a(i, depth) * b(j, depth).
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply(Accumulators& accumulators, const A& a, const B& b) {
    static_assert(depth % 16 == 0, "the depth is whole instructions");
    const int lane = ptx::opaque_lane();
    // Unrolled further, the compiler starts more loads than there are registers for.
    constexpr int unrolled = depth <= 64 ? depth / 16 : 2;
#pragma unroll(unrolled)
    for (int k = 0; k < depth; k += 16) {
      unsigned left[Accumulators::row_fragments][4];
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) load_left(left[m], a, m * 16, k, lane);
      multiply_step(accumulators, left, b, k, lane);
    }
  }

  // accumulators[i][j] += sum over keys of weights[i][key] * b(j, key). The weights go from
  // accumulator to operand in registers: two 16x8 accumulators are one 16x16 operand.
  template <class Accumulators, class Weights, class B, class Scratch>
  __device__ static void multiply_weights(Accumulators& accumulators, const Weights& weights,
                                          const B& b, const Scratch&, int, int) {
    static_assert(Weights::columns % 16 == 0, "the keys are whole instructions");
    const int lane = ptx::opaque_lane();
#pragma unroll
    for (int k = 0; k < Weights::columns; k += 16) {
      unsigned left[Accumulators::row_fragments][4];
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) {
        const auto& near = weights.value[m][k / 8];
        const auto& far = weights.value[m][k / 8 + 1];
        left[m][0] = pack(Element{}, near[0][0], near[0][1]);
        left[m][1] = pack(Element{}, near[1][0], near[1][1]);
        left[m][2] = pack(Element{}, far[0][0], far[0][1]);
        left[m][3] = pack(Element{}, far[1][0], far[1][1]);
      }
      multiply_step(accumulators, left, b, k, lane);
    }
  }

 private:
  // One step of 16 along the depth.
  template <class Accumulators, class B>
  __device__ static void multiply_step(Accumulators& accumulators,
                                       const unsigned (&left)[Accumulators::row_fragments][4],
                                       const B& b, int k, int lane) {
    static_assert(Accumulators::columns % 16 == 0, "ldmatrix brings 16 columns at a time");
#pragma unroll
    for (int n = 0; n < Accumulators::column_fragments; n += 2) {
      unsigned right[4];
      load_right(right, b, n * 8, k, lane);
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) {
        mma(accumulators.value[m][n], left[m], right[0], right[1]);
        mma(accumulators.value[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }

  __device__ static void mma(float (&c)[2][2], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (mma_depth == 16) {
      ptx::mma_m16n8k16(Element{}, c[0][0], c[0][1], c[1][0], c[1][1], a, b0, b1);
    } else {
      ptx::mma_m16n8k8(Element{}, c[0][0], c[0][1], c[1][0], c[1][1], a[0], a[1], b0);
      ptx::mma_m16n8k8(Element{}, c[0][0], c[0][1], c[1][0], c[1][1], a[2], a[3], b1);
    }
  }

  // The left operand's 16x16 block at (row, k). Matrices 0 and 1 are rows 0-7 and 8-15 of depths
  // 0-7, matrices 2 and 3 of depths 8-15; lane l gives the address of one row of matrix l / 8.
  template <class Tile>
  __device__ static void load_left(unsigned (&d)[4], const RowsByDepth<Tile>& a, int row, int k,
                                   int lane) {
    ptx::load_matrix_x4(d,
                        a.tile.chunk_at(a.row0 + row + lane % 16, (a.depth0 + k) / 8 + lane / 16));
  }
  template <class Tile>
  __device__ static void load_left(unsigned (&d)[4], const DepthByRows<Tile>& a, int row, int k,
                                   int lane) {
    ptx::load_matrix_x4_transposed(d, a.tile.chunk_at(a.depth0 + k + lane % 8 + lane / 16 * 8,
                                                      (a.row0 + row) / 8 + lane / 8 % 2));
  }

  // The right operand's 16 rows (columns of the result) at (row, k): matrices 0 and 1 are depths
  // 0-7 and 8-15 of the first eight, matrices 2 and 3 of the other eight.
  template <class Tile>
  __device__ static void load_right(unsigned (&d)[4], const RowsByDepth<Tile>& b, int row, int k,
                                    int lane) {
    ptx::load_matrix_x4(d, b.tile.chunk_at(b.row0 + row + lane % 8 + lane / 16 * 8,
                                           (b.depth0 + k) / 8 + lane / 8 % 2));
  }
  template <class Tile>
  __device__ static void load_right(unsigned (&d)[4], const DepthByRows<Tile>& b, int row, int k,
                                    int lane) {
    ptx::load_matrix_x4_transposed(
        d, b.tile.chunk_at(b.depth0 + k + lane % 16, (b.row0 + row) / 8 + lane / 16));
  }
};

}  // namespace cuflash
