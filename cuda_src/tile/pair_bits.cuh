// One bit for each pair, set where an array shows the pair. A lane reads the bits of a warp's 16
// lines of a tile of scores; steps/summarise_mask.cu writes them. Lines are queries in a forward
// pass and keys in a backward pass; the tile extends along them.
#pragma once

#include "tile_bits.cuh"

namespace cuflash {

// One lane's bits: bit 2 n + which of word `group` belongs to element (n, group, which) of a
// WarpTile.
struct alignas(8) PairBits {
  unsigned line[2];
};

// The bits that a lane holds of a tile of scores.
struct ShownPairs {
  PairBits bits{{0, 0}};
  bool every = false;  // no pair is hidden

  // The bit of element (line + di, first column + dj); di and dj are compile-time constants.
  __device__ bool at(int di, int dj) const {
    return (bits.line[di / 8] >> (dj / 8 * 2 + dj % 2) & 1) != 0;
  }
};

// A lane's bits, tile after tile along its lines.
struct PairBitsOfLine {
  const PairBits* bits;
  __device__ PairBits of(int tile) const { return bits[tile * 32]; }
};

// The bits for a term that hides pairs. `tiles` and `pairs` hold one array for each of its entries
// and heads, one after the other; `array` is the index of the array of this entry and head.
struct HiddenPairs {
  const TileBits* tiles;
  const PairBits* pairs;
  int array;

  // Row `row` of the tiles. An array has `rows` rows of tiles, each of `words` words.
  __device__ TileRow tile_row(int row, int rows, int words) const {
    return {tiles + (static_cast<long long>(array) * rows + row) * words};
  }
  // Index of the first lane's bits of sixteen lines that begin at `line`, for arrays of `lines`
  // lines and `along` tiles along them. 32 bits suffice for 2^37 pairs.
  __device__ unsigned index_of(int line, int lines, int along) const {
    return (static_cast<unsigned>(array) * (lines / 16) + line / 16) * along * 32;
  }
  __device__ PairBitsOfLine of_line(int line, int lines, int along) const {
    return {pairs + index_of(line, lines, along) + threadIdx.x % 32};
  }
};

}  // namespace cuflash
