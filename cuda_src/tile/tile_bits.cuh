// Which tiles of pairs an array shows, a bit for each: steps/summarise_mask.cu makes them. A row of
// bits is that of a q tile, over the kv tiles, in a forward pass, and that of a kv tile, over the q
// tiles, in a backward pass.
#pragma once

namespace cuflash {

// Of 32 tiles: those that have a pair which is shown, and those of which all pairs are shown.
struct TileBits {
  unsigned seen;
  unsigned whole;
};

// A tile of a row, and whether all its pairs are shown.
struct SeenTile {
  int tile;
  bool whole;
};

struct TileRow {
  const TileBits* words;

  // Of a word, without the tiles that are not in [begin, end).
  __device__ TileBits within(int word, int begin, int end) const {
    TileBits bits = words[word];
    const int before = begin - 32 * word, ahead = end - 32 * word;
    if (before > 0) bits.seen = bits.seen >> before << before;
    if (ahead < 32) bits.seen &= (1u << ahead) - 1;
    return bits;
  }
  // How many seen tiles there are in [begin, end).
  __device__ int count(int begin, int end) const {
    int sum = 0;
    for (int word = begin / 32; 32 * word < end; ++word)
      sum += __popc(within(word, begin, end).seen);
    return sum;
  }
};

// A walk along the seen tiles of [begin, end) of a row, for a thread that keeps a word of them.
struct TilesUp {
  TileRow row;
  int begin;
  int end;
  int word;
  TileBits left;  // of the word

  __device__ TilesUp(const TileRow& row, int begin, int end)
      : row(row), begin(begin), end(end), word(begin / 32 - 1), left{0, 0} {}
  // The next one; `end` if there is none.
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
  // The next one; begin - 1 if there is none.
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
