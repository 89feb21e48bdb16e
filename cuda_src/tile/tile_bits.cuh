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

  // The last seen tile of [begin, end); begin - 1 if there is none.
  __device__ SeenTile last(int begin, int end) const {
    for (int word = (end - 1) / 32; end > begin && word >= begin / 32; --word) {
      const TileBits bits = words[word];
      const int ahead = end - 32 * word;  // bits of the word that count, 32 or more for all
      const unsigned seen = ahead < 32 ? bits.seen & ((1u << ahead) - 1) : bits.seen;
      if (seen == 0) continue;
      const int bit = 31 - __clz(static_cast<int>(seen));
      if (32 * word + bit < begin) break;
      return {32 * word + bit, (bits.whole >> bit & 1) != 0};
    }
    return {begin - 1, false};
  }
  // The first one; end if there is none.
  __device__ SeenTile first(int begin, int end) const {
    for (int word = begin / 32; 32 * word < end; ++word) {
      const TileBits bits = words[word];
      const int before = begin - 32 * word;  // bits of the word that do not count, if positive
      const unsigned seen = before > 0 ? bits.seen >> before << before : bits.seen;
      if (seen == 0) continue;
      const int bit = __ffs(static_cast<int>(seen)) - 1;
      if (32 * word + bit >= end) break;
      return {32 * word + bit, (bits.whole >> bit & 1) != 0};
    }
    return {end, false};
  }
  // How many there are in [begin, end).
  __device__ int count(int begin, int end) const {
    int sum = 0;
    for (int word = begin / 32; 32 * word < end; ++word) {
      unsigned seen = words[word].seen;
      const int before = begin - 32 * word, ahead = end - 32 * word;
      if (before > 0) seen = seen >> before << before;
      if (ahead < 32) seen &= (1u << ahead) - 1;
      sum += __popc(seen);
    }
    return sum;
  }
};

}  // namespace cuflash
