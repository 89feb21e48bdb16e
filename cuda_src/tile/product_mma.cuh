// Products of 16-bit tiles on the tensor cores with float32 accumulators: mma.sync fed by ldmatrix.
#pragma once

#include "../ptx/load_matrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/opaque.cuh"
#include "numeric.cuh"
#include "operand.cuh"
#include "shared_tile.cuh"
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
    const auto left = left_of(a, lane);
    const auto right = right_of(b, lane);
    // With more unrolling, the compiler starts more loads than the registers can hold.
    constexpr int unrolled = depth <= 64 ? depth / 16 : 2;
#pragma unroll(unrolled)
    for (int k = 0; k < depth; k += 16) multiply_step(accumulators, left, right, k);
  }

  // The same, unrolled, with every fragment loaded one group of products before it is needed.
  template <int depth, class Accumulators, class A, class B>
  __device__ static void multiply_ahead(Accumulators& accumulators, const A& a, const B& b) {
    const int lane = ptx::opaque_lane();
    Ahead<depth, Accumulators, decltype(left_of(a, lane)), decltype(right_of(b, lane))> product{
        left_of(a, lane), right_of(b, lane)};
    product.begin();
#pragma unroll
    for (int i = 0; i < depth / 16 * groups_of<Accumulators>; ++i) product.step(accumulators, i);
  }

  // Two such products of one shape, one step of each in turn. One product alone has so few
  // fragments that each instruction would wait for the one before.
  template <int depth, class Accumulators, class A, class B, class C, class D>
  __device__ static void multiply_two_ahead(Accumulators& ab, const A& a, const B& b,
                                            Accumulators& cd, const C& c, const D& d) {
    const int lane = ptx::opaque_lane();
    Ahead<depth, Accumulators, decltype(left_of(a, lane)), decltype(right_of(b, lane))> first{
        left_of(a, lane), right_of(b, lane)};
    Ahead<depth, Accumulators, decltype(left_of(c, lane)), decltype(right_of(d, lane))> second{
        left_of(c, lane), right_of(d, lane)};
    first.begin();
    second.begin();
    steps_by_turns<0>(first, ab, second, cd);
  }

  struct NothingToPrepare {
    template <int columns>
    __device__ void prepare(int) const {}
  };

  // The same for a left operand [., keys] that is an accumulator in registers: two 16x8
  // accumulators form one 16x16 operand.
  template <class Accumulators, class Weights, class B, class Scratch>
  __device__ static void multiply_weights(Accumulators& accumulators, const Weights& weights,
                                          const B& b, const Scratch& scratch, int row0, int key0) {
    multiply_prepared_weights<16>(accumulators, weights, b, scratch, row0, key0,
                                  NothingToPrepare{});
  }

  // The same, and calls `prepare.prepare<part>(first)` one part ahead of the products that read
  // those columns of the weights, so that it runs beside the products of the part before.
  template <int part, class Accumulators, class Weights, class B, class Scratch, class Prepare>
  __device__ static void multiply_prepared_weights(Accumulators& accumulators,
                                                   const Weights& weights, const B& b,
                                                   const Scratch&, int, int, Prepare prepare) {
    static_assert(part % 16 == 0 && Weights::columns % part == 0,
                  "the keys are whole instructions");
    const auto right = right_of(b, ptx::opaque_lane());
    constexpr int groups = groups_of<Accumulators>;
    constexpr int count = Weights::columns / 16 * groups;
    Group<Accumulators> columns[2];
    columns[0].load(right, 0, 0);
    prepare.template prepare<part>(0);
#pragma unroll
    for (int k = 0; k < Weights::columns; k += 16) {
      if (k % part == 0 && k + part < Weights::columns) prepare.template prepare<part>(k + part);
      unsigned rows[Accumulators::row_fragments][4];
      pack_weights(rows, weights, k);
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        const int i = k / 16 * groups + group;
        if (i + 1 < count) {
          columns[(i + 1) % 2].load(right, (i + 1) % groups, (i + 1) / groups * 16);
        }
        columns[i % 2].multiply(accumulators, rows, group);
      }
    }
  }

  // Left operands of products: accumulators in registers, rounded, sixteen columns at a time.
  template <class Weights>
  struct Operands {
    unsigned value[Weights::columns / 16][Weights::row_fragments][4];
  };
  template <class Weights>
  __device__ static Operands<Weights> operands_of(const Weights& weights) {
    Operands<Weights> operands;
#pragma unroll
    for (int k = 0; k < Weights::columns; k += 16) pack_weights(operands.value[k / 16], weights, k);
    return operands;
  }

  // accumulators += weights b over all keys, one part of them at a time.
  // `weights.exponentiate<part>(first)` computes a part with its `operands`. It reads nothing that
  // earlier products change, so it overlaps with the products of the part before.
  // `weights.settle(part, first)` is called after those products and may change the accumulators
  // and the part.
  template <int part, int keys, class Accumulators, class B, class Weights>
  __device__ static void multiply_parts(Accumulators& accumulators, const B& b, Weights weights) {
    static_assert(part % 16 == 0 && keys % part == 0, "the keys are whole instructions");
    const auto right = right_of(b, ptx::opaque_lane());
    constexpr int groups = groups_of<Accumulators>;
    constexpr int count = keys / 16 * groups;
    Group<Accumulators> columns[2];
    columns[0].load(right, 0, 0);
    auto now = weights.template exponentiate<part>(0);
    weights.settle(now, 0);
#pragma unroll
    for (int first = 0; first < keys; first += part) {
      const bool more = first + part < keys;
      auto next = more ? weights.template exponentiate<part>(first + part) : now;
#pragma unroll
      for (int i = first / 16 * groups; i < (first + part) / 16 * groups; ++i) {
        if (i + 1 < count) {
          columns[(i + 1) % 2].load(right, (i + 1) % groups, (i + 1) / groups * 16);
        }
        columns[i % 2].multiply(accumulators, now.operands.value[i / groups - first / 16],
                                i % groups);
      }
      if (more) weights.settle(next, first + part);
      now = next;
    }
  }

 private:
  // The rows of 8x8 matrices that a lane addresses in an operand. load(d, row, k) loads the
  // operand's 16x16 block at (row, k).
  template <class Chunks, bool transposed>
  struct Fragments {
    Chunks chunks;
    __device__ void load(unsigned (&d)[4], int row, int k) const {
      if constexpr (transposed) {
        ptx::load_matrix_x4_transposed(d, chunks.at(k, row / 8));
      } else {
        ptx::load_matrix_x4(d, chunks.at(row, k / 8));
      }
    }
  };
  template <class Tile, class Offset>
  using ChunksOf = LaneChunks<Tile, is_aligned<Offset>>;

  // Lane l gives the address of one row of matrix l / 8. Left: matrices 0 and 1 are rows 0-7 and
  // 8-15 of depths 0-7, matrices 2 and 3 of depths 8-15.
  template <class Tile, class Offset>
  __device__ static auto left_of(const RowsByDepth<Tile, Offset>& a, int lane) {
    return Fragments<ChunksOf<Tile, Offset>, false>{
        {a.tile, a.row0 + lane % 16, a.depth0 / 8 + lane / 16}};
  }
  template <class Tile, class Offset>
  __device__ static auto left_of(const DepthByRows<Tile, Offset>& a, int lane) {
    return Fragments<ChunksOf<Tile, Offset>, true>{
        {a.tile, a.depth0 + lane % 8 + lane / 16 * 8, a.row0 / 8 + lane / 8 % 2}};
  }

  // Right: its rows are columns of the result. Matrices 0 and 1 are depths 0-7 and 8-15 of the
  // first eight columns, matrices 2 and 3 those depths of the other eight.
  template <class Tile, class Offset>
  __device__ static auto right_of(const RowsByDepth<Tile, Offset>& b, int lane) {
    return Fragments<ChunksOf<Tile, Offset>, false>{
        {b.tile, b.row0 + lane % 8 + lane / 16 * 8, b.depth0 / 8 + lane / 8 % 2}};
  }
  template <class Tile, class Offset>
  __device__ static auto right_of(const DepthByRows<Tile, Offset>& b, int lane) {
    return Fragments<ChunksOf<Tile, Offset>, true>{
        {b.tile, b.depth0 + lane % 16, b.row0 / 8 + lane / 16}};
  }

  // Packs two 16x8 accumulators into one 16x16 left operand, for every sixteen rows.
  template <class Weights>
  __device__ static void pack_weights(unsigned (&d)[Weights::row_fragments][4],
                                      const Weights& weights, int k) {
#pragma unroll
    for (int m = 0; m < Weights::row_fragments; ++m) {
      const auto& near = weights.value[m][k / 8];
      const auto& far = weights.value[m][k / 8 + 1];
      d[m][0] = pack(Element{}, near[0][0], near[0][1]);
      d[m][1] = pack(Element{}, near[1][0], near[1][1]);
      d[m][2] = pack(Element{}, far[0][0], far[0][1]);
      d[m][3] = pack(Element{}, far[1][0], far[1][1]);
    }
  }

  template <int row_fragments, class Left>
  __device__ static void load_left(unsigned (&d)[row_fragments][4], const Left& left, int k) {
#pragma unroll
    for (int m = 0; m < row_fragments; ++m) left.load(d[m], m * 16, k);
  }

  // Right fragments of a few columns, loaded ahead of the products that need them.
  template <class Accumulators>
  static constexpr int group_pairs = Accumulators::column_fragments % 4 == 0 ? 2 : 1;
  template <class Accumulators>
  static constexpr int groups_of = Accumulators::column_fragments / 2 / group_pairs<Accumulators>;
  template <class Accumulators>
  struct Group {
    static constexpr int pairs = group_pairs<Accumulators>;
    unsigned value[pairs][4];
    template <class Right>
    __device__ void load(const Right& right, int group, int k) {
#pragma unroll
      for (int i = 0; i < pairs; ++i) right.load(value[i], (group * pairs + i) * 16, k);
    }
    __device__ void multiply(Accumulators& accumulators,
                             const unsigned (&left)[Accumulators::row_fragments][4],
                             int group) const {
#pragma unroll
      for (int i = 0; i < pairs; ++i) {
        const int n = (group * pairs + i) * 2;
#pragma unroll
        for (int m = 0; m < Accumulators::row_fragments; ++m) {
          mma(accumulators.value[m][n], left[m], value[i][0], value[i][1]);
          mma(accumulators.value[m][n + 1], left[m], value[i][2], value[i][3]);
        }
      }
    }
  };

  // A product whose fragments are loaded one step before they are needed; a step is a group of
  // products.
  template <int depth, class Accumulators, class Left, class Right>
  struct Ahead {
    static constexpr int groups = groups_of<Accumulators>;
    static constexpr int count = depth / 16 * groups;
    Left left;
    Right right;
    unsigned rows[2][Accumulators::row_fragments][4];
    Group<Accumulators> columns[2];
    __device__ void begin() {
      load_left(rows[0], left, 0);
      columns[0].load(right, 0, 0);
    }
    __device__ void step(Accumulators& accumulators, int i) {
      const int next = i + 1;
      const int k = i / groups * 16;
      if (i % groups == 0 && k + 16 < depth) load_left(rows[(i / groups + 1) % 2], left, k + 16);
      if (next < count) columns[next % 2].load(right, next % groups, next / groups * 16);
      columns[i % 2].multiply(accumulators, rows[i / groups % 2], i % groups);
    }
  };

  // The steps from number i on of two products. This is a recursion because the compiler does not
  // unroll a loop of so much code.
  template <int i, class First, class Second, class Accumulators>
  __device__ static void steps_by_turns(First& first, Accumulators& ab, Second& second,
                                        Accumulators& cd) {
    if constexpr (i < First::count) {
      first.step(ab, i);
      second.step(cd, i);
      steps_by_turns<i + 1>(first, ab, second, cd);
    }
  }

  // One step of 16 along the depth.
  template <class Accumulators, class Left, class Right>
  __device__ static void multiply_step(Accumulators& accumulators, const Left& left,
                                       const Right& right, int k) {
    unsigned fragments[Accumulators::row_fragments][4];
#pragma unroll
    for (int m = 0; m < Accumulators::row_fragments; ++m) left.load(fragments[m], m * 16, k);
    multiply_fragments(accumulators, fragments, right, k);
  }

  // The same with the left operand's blocks in registers.
  template <class Accumulators, class Right>
  __device__ static void multiply_fragments(Accumulators& accumulators,
                                            const unsigned (&left)[Accumulators::row_fragments][4],
                                            const Right& right, int k) {
    static_assert(Accumulators::columns % 16 == 0, "ldmatrix brings 16 columns at a time");
#pragma unroll
    for (int n = 0; n < Accumulators::column_fragments; n += 2) {
      unsigned fragments[4];
      right.load(fragments, n * 8, k);
#pragma unroll
      for (int m = 0; m < Accumulators::row_fragments; ++m) {
        mma(accumulators.value[m][n], left[m], fragments[0], fragments[1]);
        mma(accumulators.value[m][n + 1], left[m], fragments[2], fragments[3]);
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
};

}  // namespace cuflash
