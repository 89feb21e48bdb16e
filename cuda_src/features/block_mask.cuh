// Block mask: hides the blocks of queries and keys where it is false.
#pragma once

#include "../tile/numeric.cuh"
#include "pairs.cuh"

namespace cuflash {

struct BlockMaskParams {
  const void* block_mask;  // one byte a block, 0 is false
  // In elements; 0 along an axis that the mask broadcasts.
  long long block_mask_batch_stride;
  long long block_mask_head_stride;
  long long block_mask_row_stride;
  long long block_mask_column_stride;
  int entries;      // neighbouring batch entries that share one entry of the mask
  int own_entries;  // entries of the mask
  int q_blocks;     // of a sequence
  int kv_blocks;
};

struct ListedBlocksParams {
  const void* block_mask;
  long long block_mask_batch_stride;
  long long block_mask_head_stride;
  long long block_mask_row_stride;
  long long block_mask_column_stride;
  int entries;
  int own_entries;
  int q_blocks;
  int kv_blocks;
  int own_heads;
  const void* block_bits;  // see tile/tile_bits.cuh; [entry, head, row of tiles, words]
};

// The blocks of an entry and a head.
struct BlocksOfHead {
  const unsigned char* data;
  long long row_stride;
  long long column_stride;
  int last_row;
  int last_column;

  template <class Block>
  __device__ BlocksOfHead(const Block& block, int batch, int head)
      : data(static_cast<const unsigned char*>(block.block_mask) +
             own_entry(block, batch) * block.block_mask_batch_stride +
             head * block.block_mask_head_stride),
        row_stride(block.block_mask_row_stride),
        column_stride(block.block_mask_column_stride),
        last_row(block.q_blocks - 1),
        last_column(block.kv_blocks - 1) {}
  // The last block stands for blocks beyond the lengths, which the lengths hide.
  __device__ bool shows(int row, int column) const {
    return data[min(row, last_row) * row_stride + min(column, last_column) * column_stride] != 0;
  }
};

// The most blocks of `block` rows that a tile of `rows` rows overlaps. The tile begins at a
// multiple of `rows`.
__device__ constexpr int blocks_met(int rows, int block) {
  if (block % rows == 0) return 1;
  return rows % block == 0 ? rows / block : (block + rows - 2) / block + 1;
}

// One bit for each block of a tile, set where it is shown.
template <class Config, int block_queries, int block_keys>
struct BlocksOfTile {
  static constexpr int rows = blocks_met(Config::block_q, block_queries);
  static constexpr int columns = blocks_met(Config::block_kv, block_keys);
  static constexpr bool one = rows * columns == 1;
  static_assert(rows * columns <= 32, "a bit for each block of a tile");
  unsigned bits = 0;
  int row = 0;  // of the lane's first query in its block
  int column = 0;

  template <class Block>
  __device__ BlocksOfTile(const Block& block, const Lane& lane) {
    const BlocksOfHead blocks(block, lane.batch, lane.head);
    row = lane.i % block_queries;
    column = lane.j % block_keys;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const bool shown = blocks.shows(lane.i / block_queries + r, lane.j / block_keys + c);
        bits |= static_cast<unsigned>(shown) << (r * columns + c);
      }
    }
  }
  // The bit of element (lane's query + di, lane's key + dj).
  __device__ bool at(int di, int dj) const {
    if constexpr (one) return bits != 0;
    const int r = rows == 1 ? 0 : (row + di) / block_queries;
    const int c = columns == 1 ? 0 : (column + dj) / block_keys;
    return (bits >> (r * columns + c) & 1) != 0;
  }
};

template <class Config, int block_queries, int block_keys>
struct BlockMaskTerm : AddedTerm {
  static constexpr bool skips = true;
  using Compute = decltype(to_compute(typename Config::Storage()));
  const BlocksOfTile<Config, block_queries, block_keys> blocks;

  template <class Params>
  __device__ BlockMaskTerm(const Params& params, const Lane& lane, double)
      : blocks(params.block_mask, lane) {}

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return blocks.at(di, dj) ? score : -infinity<Compute>();
  }

  // Whether some pair of a tile is in a shown block.
  template <class Params>
  __device__ static bool shows(const Params& params, int batch, int head, int query, int key) {
    const BlocksOfHead blocks(params.block_mask, batch, head);
    const int last_query = min(query + Config::block_q, params.shape.seqlen_q) - 1;
    const int last_key = min(key + Config::block_kv, params.shape.seqlen_kv) - 1;
    bool shown = false;
    for (int r = query / block_queries; r <= last_query / block_queries; ++r) {
      for (int c = key / block_keys; c <= last_key / block_keys; ++c) shown |= blocks.shows(r, c);
    }
    return shown;
  }
};

// The shown blocks of a tile in FlashAttention-3's kernels, for a warp. Its sixteen lines are in
// one block, so it needs one bit for each 64 elements along the lines.
template <class Config, int block_queries, int block_keys,
          bool = Config::block_q % 64 == 0 && Config::block_kv % 64 == 0>
struct BlocksOfLines {
  unsigned bits = 0;
  const bool transposed;  // lines are keys

  template <class Block>
  __device__ BlocksOfLines(const Block& block, const Lane& lane)
      : transposed(lane.staged.transposed) {
    if (Config::listed && !Config::packed && transposed) {
      bits = lane.shown.bits.line[0];  // the load role has read them, see shown_parts
      return;
    }
    const BlocksOfHead blocks(block, lane.batch, lane.head);
    const int along = transposed ? Config::block_q : Config::block_kv;
#pragma unroll
    for (int at = 0; at < max(Config::block_q, Config::block_kv); at += 64) {
      if (at >= along) break;
      const int query = lane.i + (transposed ? at : 0), key = lane.j + (transposed ? 0 : at);
      const bool shown = blocks.shows(query / block_queries, key / block_keys);
      bits |= static_cast<unsigned>(shown) << (at / 64);
    }
  }
  __device__ bool at(int di, int dj) const {
    return (bits >> ((transposed ? di : dj) / 64) & 1) != 0;
  }
};
template <class Config, int block_queries, int block_keys>
struct BlocksOfLines<Config, block_queries, block_keys, false>
    : BlocksOfTile<Config, block_queries, block_keys> {
  using BlocksOfTile<Config, block_queries, block_keys>::BlocksOfTile;
};

// The block mask where bits say which tiles show anything. Only tiles that a block boundary cuts,
// and hidden tiles that the loop still visits, read the mask itself.
template <class Config, int block_queries, int block_keys>
struct ListedBlocksTerm : AddedTerm {
  static constexpr bool hides = Config::listed && !Config::packed;
  // A tile is in one block: it is hidden entirely or not at all.
  static constexpr bool one =
      block_queries % Config::block_q == 0 && block_keys % Config::block_kv == 0;
  using Compute = decltype(to_compute(typename Config::Storage()));
  const BlocksOfLines<Config, block_queries, block_keys> blocks;

  template <class Params>
  __device__ ListedBlocksTerm(const Params& params, const Lane& lane, double)
      : blocks(params.block_mask, lane) {}

  template <class Params>
  __device__ static HiddenPairs hidden(const Params& params, int batch, int head) {
    const ListedBlocksParams& blocks = params.block_mask;
    const int entry = own_entry(blocks, batch);
    return {static_cast<const TileBits*>(blocks.block_bits), nullptr,
            entry * blocks.own_heads + (blocks.own_heads == 1 ? 0 : head)};
  }

  template <class Params>
  __device__ static unsigned shown_parts(const Params& params, int batch, int head, int query,
                                         int key) {
    if constexpr (one) return 0;  // only a hidden tile gets here: all its pairs are hidden
    const BlocksOfHead blocks(params.block_mask, batch, head);
    unsigned bits = 0;
    for (int m = 0; m < Config::block_kv / 64; ++m) {
      for (int n = 0; n < Config::block_q / 64; ++n) {
        const bool shown =
            blocks.shows((query + 64 * n) / block_queries, (key + 64 * m) / block_keys);
        bits |= static_cast<unsigned>(shown) << (2 * m + n);
      }
    }
    return bits;
  }

  __device__ Compute operator()(Compute score, int di, int dj) const {
    if constexpr (hides && one) return -infinity<Compute>();
    return blocks.at(di, dj) ? score : -infinity<Compute>();
  }
};

}  // namespace cuflash
