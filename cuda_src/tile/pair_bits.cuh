// The pairs that an array shows, a bit for each, as a lane reads them of a warp's 16 lines of a
// tile of scores: steps/summarise_mask.cu makes them. Lines are those of queries in a forward pass,
// and those of keys in a backward pass; a tile goes along them.
#pragma once

#include "tile_bits.cuh"

namespace cuflash {

// Of a lane: bit 2 n + which of word `group` is of element (n, group, which), see WarpTile.
struct alignas(8) PairBits {
  unsigned line[2];
};

// What a lane knows of a tile of scores.
struct ShownPairs {
  PairBits bits{{0, 0}};
  bool every = false;  // no pair is hidden

  // Of element (line + di, first column + dj), which the compiler knows.
  __device__ bool at(int di, int dj) const {
    return (bits.line[di / 8] >> (dj / 8 * 2 + dj % 2) & 1) != 0;
  }
};

// Of a lane, tile after tile along its lines.
struct PairBitsOfLine {
  const PairBits* bits;
  __device__ PairBits of(int tile) const { return bits[tile * 32]; }
};

// What a term that hides pairs has of them: bits of all its entries and heads, one after the other,
// and the number of that which an entry and a head of the batch have.
struct HiddenPairs {
  const TileBits* tiles;
  const PairBits* pairs;
  int array;

  // Of arrays of so many rows of tiles, and words in a row.
  __device__ TileRow tile_row(int row, int rows, int words) const {
    return {tiles + (static_cast<long long>(array) * rows + row) * words};
  }
  // Of the sixteen lines from this one on, of arrays of so many lines and tiles along them. Less
  // than 2^32 of all lanes, which are bits of 2^37 pairs: the index of the first lane's.
  __device__ unsigned index_of(int line, int lines, int along) const {
    return (static_cast<unsigned>(array) * (lines / 16) + line / 16) * along * 32;
  }
  __device__ PairBitsOfLine of_line(int line, int lines, int along) const {
    return {pairs + index_of(line, lines, along) + threadIdx.x % 32};
  }
};

}  // namespace cuflash
