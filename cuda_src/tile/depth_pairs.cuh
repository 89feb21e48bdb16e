// Operand fragments of four- and eight-byte elements, two neighbours of the depth at a time. An
// instruction may sum the depth in any order that both operands share. In a step of 8, lane l gives
// depths 2 * (l % 4) and 2 * (l % 4) + 1 where the instruction's own order has l % 4 and l % 4 + 4.
// A lane holds those same columns of an accumulator, so an accumulator is a left operand without
// any change; and a lane reads elements that lie side by side.
//
// Bank conflicts, for tiles whose rows are whole 128-byte lines: none with the depth down the
// columns, because the eight or four chunks read at once lie in rows of different permutations.
// With the depth along the rows, two rows meet in each bank and the load takes twice its time. In
// narrower tiles (bucket 16 of float32, blocks that are no multiple of 128 bytes) two rows meet
// either way.
#pragma once

#include "../ptx/load_shared.cuh"
#include "operand.cuh"
#include "shared_tile.cuh"

namespace cuflash {

// load(d, row, k) reads depths k + 2 * (l % 4) and k + 2 * (l % 4) + 1 of operand row `row` + l /
// 4; `row` and `k` are multiples of 8.
template <class Operand>
struct DepthPairs;

template <class Tile, class Offset>
struct DepthPairs<RowsByDepth<Tile, Offset>> {
  using Element = typename Tile::Element;
  LaneChunks<Tile, is_aligned<Offset>> chunks;

  __device__ DepthPairs(const RowsByDepth<Tile, Offset>& operand, int lane)
      : chunks{operand.tile, operand.row0 + lane / 4,
               operand.depth0 / Tile::chunk + lane % 4 * 2 / Tile::chunk,
               lane % 4 * 2 % Tile::chunk * static_cast<int>(sizeof(Element))} {}
  __device__ void load(Element (&d)[2], int row, int k) const {
    ptx::load_shared(d, chunks.at(row, k / Tile::chunk));
  }
};

template <class Tile, class Offset>
struct DepthPairs<DepthByRows<Tile, Offset>> {
  using Element = typename Tile::Element;
  LaneChunks<Tile, is_aligned<Offset>> chunks;

  __device__ DepthPairs(const DepthByRows<Tile, Offset>& operand, int lane)
      : chunks{operand.tile, operand.depth0 + lane % 4 * 2,
               operand.row0 / Tile::chunk + lane / 4 / Tile::chunk,
               lane / 4 % Tile::chunk * static_cast<int>(sizeof(Element))} {}
  __device__ void load(Element (&d)[2], int row, int k) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) ptx::load_shared(d[i], chunks.at(k + i, row / Tile::chunk));
  }
};

// Whether the depth of an operand runs along the rows of its tile.
template <class Operand>
constexpr bool depth_along_row = false;
template <class Tile, class Offset>
constexpr bool depth_along_row<RowsByDepth<Tile, Offset>> = true;

// Whether this holds for both operands, so that they can be read in wider pieces.
template <class A, class B>
constexpr bool depth_along_rows = depth_along_row<A> && depth_along_row<B>;

}  // namespace cuflash
