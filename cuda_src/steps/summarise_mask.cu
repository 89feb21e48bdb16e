// Turns a boolean mask into bits: for each tile whether any pair is shown and whether all are, see
// tile/tile_bits.cuh, and for each pair, see tile/pair_bits.cuh. It reads every byte once.
//
// A block makes the bits of eight neighbouring tiles of a row of tiles. A row belongs to a q tile
// and runs over the kv tiles; with Config::rows_of_keys it belongs to a kv tile and runs over the q
// tiles. Pairs beyond the lengths do not count for a tile. With Config::one_row the mask is the
// same for all queries: there is one row of tiles, or one tile in a row, and one query represents
// all.
#include "../tile/copy.cuh"
#include "../tile/pair_bits.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"

namespace cuflash::steps {

constexpr int kKeysOfChunk = 16;  // read at once
constexpr int kTilesOfBlock = 8;

// One bit for each of four bytes, which is set if the byte is not 0.
__device__ inline unsigned bits_of_bytes(unsigned bytes) {
  const unsigned low = 0x7f7f7f7fu;
  const unsigned high_bits = (((bytes & low) + low) | bytes) >> 7 & 0x01010101u;
  return high_bits * 0x10204080u >> 28;
}

// The mask of an entry and a head.
struct MaskOfHead {
  const unsigned char* data;
  long long row_stride;
  long long column_stride;
  bool in_chunks;  // sixteen keys can be read at once

  // The bytes of the sixteen keys of a chunk.
  __device__ uint4 chunk(int query, int key) const {
    return *reinterpret_cast<const uint4*>(data + query * row_stride + key);
  }
  // Bits of the keys, up to sixteen, that a query sees.
  __device__ unsigned keys(int query, int key, int count) const {
    const unsigned char* from = data + query * row_stride + key * column_stride;
    unsigned bits = 0;
    for (int i = 0; i < count; ++i) {
      bits |= static_cast<unsigned>(from[i * column_stride] != 0) << i;
    }
    return bits;
  }
};

__device__ inline unsigned bits_of_chunk(const uint4& bytes) {
  return bits_of_bytes(bytes.x) | bits_of_bytes(bytes.y) << 4 | bits_of_bytes(bytes.z) << 8 |
         bits_of_bytes(bytes.w) << 12;
}

// A tile of a mask in shared memory: one number for each query and sixteen keys.
template <class Config>
struct TileOfMask {
  static constexpr int chunks = Config::block_kv / kKeysOfChunk;
  static constexpr int threads = 32 * Config::warps;
  static_assert(Config::block_kv % kKeysOfChunk == 0, "whole chunks");
  unsigned short keys[Config::block_q][chunks];

  // All threads load the tile. Returns 1 if a pair is shown, plus 2 if one is hidden.
  __device__ int load(const MaskOfHead& mask, int row0, int rows, int key0, int valid_keys) {
    if (mask.in_chunks && valid_keys >= Config::block_kv) {
      return load_chunks(mask, row0, rows, key0);
    }
    int kinds = 0;
    for (int unit = threadIdx.x; unit < Config::block_q * chunks; unit += threads) {
      const int row = unit / chunks, key = unit % chunks * kKeysOfChunk;
      const int left = row < rows ? min(valid_keys - key, kKeysOfChunk) : 0;
      const unsigned shown = left > 0 ? mask.keys(row0 + row, key0 + key, left) : 0;
      if (left > 0) kinds |= kinds_of(shown, (1u << left) - 1);
      keys[row][key / kKeysOfChunk] = static_cast<unsigned short>(shown);
    }
    return kinds;
  }
  // The same for whole chunks: all loads of a thread are in flight at once.
  __device__ int load_chunks(const MaskOfHead& mask, int row0, int rows, int key0) {
    constexpr int units = Config::block_q * chunks;
    constexpr int rounds = (units + threads - 1) / threads;
    uint4 bytes[rounds];
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int unit = round * threads + static_cast<int>(threadIdx.x), row = unit / chunks;
      bytes[round] = make_uint4(0, 0, 0, 0);
      if (row < rows) bytes[round] = mask.chunk(row0 + row, key0 + unit % chunks * kKeysOfChunk);
    }
    int kinds = 0;
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const int unit = round * threads + static_cast<int>(threadIdx.x), row = unit / chunks;
      const unsigned shown = bits_of_chunk(bytes[round]);
      if (row < rows) kinds |= kinds_of(shown, 0xffff);
      if (unit < units) keys[row][unit % chunks] = static_cast<unsigned short>(shown);
    }
    return kinds;
  }
  __device__ static int kinds_of(unsigned shown, unsigned every) {
    return (shown != 0 ? 1 : 0) | (shown != every ? 2 : 0);
  }
  // The bits of a lane of the warp whose first line is `line`.
  __device__ PairBits of_queries(int line) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % 4 * 2;
    PairBits bits{{0, 0}};
    for (int group = 0; group < 2; ++group) {
      const int row = Config::one_row ? 0 : line + lane / 4 + 8 * group;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const unsigned shown = keys[row][chunk];
        const unsigned four = (shown >> column & 3) | (shown >> (8 + column) & 3) << 2;
        bits.line[group] |= four << (4 * chunk);
      }
    }
    return bits;
  }
  __device__ PairBits of_keys(int line) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    PairBits bits{{0, 0}};
    for (int n = 0; n < Config::block_q / 8; ++n) {
      for (int which = 0; which < 2; ++which) {
        const int row = Config::one_row ? 0 : 8 * n + lane % 4 * 2 + which;
        const unsigned shown = keys[row][line / kKeysOfChunk] >> (lane / 4);
        bits.line[0] |= (shown & 1) << (2 * n + which);
        bits.line[1] |= (shown >> 8 & 1) << (2 * n + which);
      }
    }
    return bits;
  }
};

template <class Config>
__device__ inline void summarise_mask(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto* const tiles = reinterpret_cast<TileOfMask<Config>*>(shared_bytes);  // used in turn
  static_assert(2 * sizeof(TileOfMask<Config>) <= Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  constexpr bool by_keys = Config::rows_of_keys != 0;
  const Shape& shape = params.shape;
  const int q_tiles = Config::one_row ? 1 : ceil_div(shape.seqlen_q, Config::block_q);
  const int kv_tiles = ceil_div(shape.seqlen_kv, Config::block_kv);
  const int along = by_keys ? q_tiles : kv_tiles, rows = by_keys ? kv_tiles : q_tiles;
  const int words = ceil_div(along, 32);
  const int place = static_cast<int>(blockIdx.x) / 4;  // index of the word
  const int first = place % words * 32 + static_cast<int>(blockIdx.x) % 4 * kTilesOfBlock;
  const int row = place / words % rows;
  const int of_array = place / words / rows;
  const int heads = static_cast<int>(params.mask_heads);
  const PairArray& mask = params.mask;
  const auto* data = static_cast<const unsigned char*>(mask.data) +
                     of_array / heads * mask.batch_stride + of_array % heads * mask.head_stride;
  const bool in_chunks = mask.column_stride == 1 && mask.row_stride % 16 == 0 &&
                         reinterpret_cast<unsigned long long>(data) % 16 == 0;
  const MaskOfHead of_head{data, mask.row_stride, mask.column_stride, in_chunks};

  constexpr int lines = by_keys ? Config::block_kv : Config::one_row ? 16 : Config::block_q;
  const long long lines_before = (static_cast<long long>(of_array) * rows + row) * (lines / 16);
  unsigned seen = 0, whole = 0;
  for (int i = 0; i < kTilesOfBlock && first + i < along; ++i) {
    const int other = first + i;
    const int key0 = (by_keys ? row : other) * Config::block_kv;
    const int row0 = Config::one_row ? 0 : (by_keys ? other : row) * Config::block_q;
    const int queries = Config::one_row ? 1 : min(Config::block_q, shape.seqlen_q - row0);
    TileOfMask<Config>& tile = tiles[i % 2];
    const int kinds = tile.load(of_head, row0, queries, key0, shape.seqlen_kv - key0);
    seen |= (__syncthreads_or(kinds & 1) ? 1u : 0u) << i;
    whole |= (__syncthreads_or(kinds & 2) ? 0u : 1u) << i;
    for (int line = static_cast<int>(threadIdx.x) / 32 * 16; line < lines;
         line += 16 * Config::warps) {
      const long long at = ((lines_before + line / 16) * along + other) * 32 + threadIdx.x % 32;
      static_cast<PairBits*>(params.pair_bits)[at] =
          by_keys ? tile.of_keys(line) : tile.of_queries(line);
    }
  }
  if (!Config::listed || threadIdx.x != 0) return;
  TileBits& bits = static_cast<TileBits*>(params.tile_bits)[place];
  reinterpret_cast<unsigned char*>(&bits.seen)[blockIdx.x % 4] = static_cast<unsigned char>(seen);
  reinterpret_cast<unsigned char*>(&bits.whole)[blockIdx.x % 4] = static_cast<unsigned char>(whole);
}

}  // namespace cuflash::steps
