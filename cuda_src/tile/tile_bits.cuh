// The tiles of pairs that an array shows, one bit for each; steps/summarise_mask.cu writes them. In
// a forward pass a row of bits belongs to a q tile and runs over the kv tiles; in a backward pass
// it belongs to a kv tile and runs over the q tiles.
#pragma once

namespace cuflash {

// Bits of 32 tiles: `seen` marks tiles with a shown pair, `whole` marks tiles whose pairs are all
// shown.
struct TileBits {
  unsigned seen;
  unsigned whole;
};

// A tile of a row, and whether it shows all its pairs.
struct SeenTile {
  int tile;
  bool whole;
};

struct TileRow {
  const TileBits* words;

  // A word without the tiles outside of [begin, end).
  __device__ TileBits within(int word, int begin, int end) const {
    TileBits bits = words[word];
    const int before = begin - 32 * word, ahead = end - 32 * word;
    if (before > 0) bits.seen = bits.seen >> before << before;
    if (ahead < 32) bits.seen &= (1u << ahead) - 1;
    return bits;
  }
  // The number of seen tiles in [begin, end).
  __device__ int count(int begin, int end) const {
    int sum = 0;
    for (int word = begin / 32; 32 * word < end; ++word)
      sum += __popc(within(word, begin, end).seen);
    return sum;
  }
};

// Walks along the seen tiles of [begin, end) of a row; the thread keeps one word of bits.
struct TilesUp {
  TileRow row;
  int begin;
  int end;
  int word;
  TileBits left;  // bits of the word not yet visited

  __device__ TilesUp(const TileRow& row, int begin, int end)
      : row(row), begin(begin), end(end), word(begin / 32 - 1), left{0, 0} {}
  // The next tile; `end` if there is none.
  __device__ SeenTile next() {
    while (left.seen == 0) {
      if (32 * (word + 1) >= end) return {end, false};
      left = row.within(++word, begin, end);
    }
    const int bit = __ffs(static_cast<int>(left.seen)) - 1;
    left.seen &= left.seen - 1;
    return {32 * word + bit, (left.whole >> bit & 1) != 0};
  }
};
struct TilesDown {
  TileRow row;
  int begin;
  int end;
  int word;
  TileBits left;

  __device__ TilesDown(const TileRow& row, int begin, int end)
      : row(row), begin(begin), end(end), word((end + 31) / 32), left{0, 0} {}
  // The next tile; begin - 1 if there is none.
  __device__ SeenTile next() {
    while (left.seen == 0) {
      if (32 * word <= begin) return {begin - 1, false};
      left = row.within(--word, begin, end);
    }
    const int bit = 31 - __clz(static_cast<int>(left.seen));
    left.seen ^= 1u << bit;
    return {32 * word + bit, (left.whole >> bit & 1) != 0};
  }
};

}  // namespace cuflash
