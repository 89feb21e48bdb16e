// FlashAttention-3 forward where bits tell which blocks of keys a q tile sees, and which pairs. A
// block that is hidden as a whole is neither loaded nor computed. The load role walks along the
// list. With K of a block it writes a note that tells the math roles which block it is.
#pragma once

#include "forward_load.cuh"
#include "forward_math.cuh"

namespace cuflash::fa3 {

// The size of an array of bits: its number of lines, and the number of kv tiles along a line.
template <class Config>
__device__ inline int lines_of_bits(const Shape& shape) {
  return Config::one_row ? 16 : ceil_div(shape.seqlen_q, Config::block_q) * Config::block_q;
}
template <class Config>
__device__ inline int tiles_of_bits(const Shape& shape) {
  return ceil_div(shape.seqlen_kv, Config::block_kv);
}

// The load role's note of a block.
struct BlockNote {
  SeenTile block;
  bool last;  // of the tile
  __device__ int word() const { return block.tile * 4 + block.whole * 2 + last; }
  __device__ static BlockNote of(int word) {
    return {{word >> 2, (word & 2) != 0}, (word & 1) != 0};
  }
};

// The blocks of a tile, last first, for the loading thread. There is at least one; if the list is
// empty, it is a hidden one.
template <class Config>
struct ListedBlocks {
  TilesDown tiles;
  SeenTile block;  // of this step
  SeenTile next;

  __device__ ListedBlocks(const ForwardContext<Config>& c, const ForwardTile<Config>& tile)
      : tiles(row_of(c, tile.item), tile.kv.begin, tile.kv.end) {
    block = tiles.next();
    if (block.tile < tiles.begin) block = {tile.kv.end - 1, false};
    next = tiles.next();
  }
  __device__ BlockNote note() const { return {block, is_last()}; }
  __device__ bool is_last() const { return next.tile < tiles.begin; }
  __device__ void advance() {
    block = next;
    next = tiles.next();
  }

 private:
  __device__ static TileRow row_of(const ForwardContext<Config>& c, const WorkItem& item) {
    const Shape& shape = c.params.shape;
    const int rows = lines_of_bits<Config>(shape) / (Config::one_row ? 16 : Config::block_q);
    return Config::Score::List::hidden(c.params, item.entry, item.head)
        .tile_row(Config::one_row ? 0 : item.q_tile, rows,
                  ceil_div(tiles_of_bits<Config>(shape), 32));
  }
};

// load_role() where blocks are listed.
template <class Config>
__device__ inline void load_listed_role(const ForwardContext<Config>& c) {
  const Shape& shape = c.params.shape;
  const auto order = q_order(c);
  const int tiles = static_cast<int>(order.tiles) * shape.heads_q * shape.batch;
  ForwardLoader<Config> loader(c);
  ForwardTile<Config> tile = c.tile(q_item_of<Config>(c.params, order, blockIdx.x));
  ListedBlocks<Config> blocks(c, tile);
  loader.pass_on(tile);
  loader.load_k(tile, blocks.block.tile, blocks.note().word());
  loader.load_q(tile);
#pragma unroll 1
  while (true) {
    int ticket = 0;
    if (blocks.is_last()) ticket = draw_ticket(c.params.tile_counter);
#pragma unroll 1
    while (!blocks.is_last()) {
      const int before = blocks.block.tile;
      blocks.advance();
      if (blocks.is_last()) ticket = draw_ticket(c.params.tile_counter);
      loader.load_k(tile, blocks.block.tile, blocks.note().word());
      loader.load_v(tile, before);
    }
    const int number = tile_of_ticket(c.params.tile_counter, ticket, tiles);
    if (number >= tiles) break;
    const ForwardTile<Config> next = c.tile(q_item_of<Config>(c.params, order, number));
    loader.pass_on(next);
    loader.load_v(tile, blocks.block.tile);
    tile = next;
    blocks = ListedBlocks<Config>(c, tile);
    loader.load_k(tile, blocks.block.tile, blocks.note().word());
    loader.load_q(tile);
  }
  loader.pass_on_nothing();
  loader.load_v(tile, blocks.block.tile);
  loader.end();
}

// The listed blocks of a tile for a warpgroup, which computes every one of them.
template <class Config>
struct WarpgroupList {
  int row0;             // of the warpgroup
  PairBitsOfLine bits;  // of the warp
  BlockNote note;
  ShownPairs shown;
  KvRange seen;  // blocks that are left; begins at -1 until this step's block is the last

  __device__ WarpgroupList(const ForwardContext<Config>& c, const ForwardTile<Config>& tile,
                           int warpgroup, int warp_row)
      : row0(tile.q_begin() + warpgroup * kRowsOfWarpgroup),
        bits(Config::Score::List::hidden(c.params, tile.item.entry, tile.item.head)
                 .of_line(Config::one_row ? 0 : row0 + warp_row,
                          lines_of_bits<Config>(c.params.shape),
                          tiles_of_bits<Config>(c.params.shape))),
        note{} {}
  // Finds the block whose K has arrived in a stage, before its products are issued.
  __device__ __forceinline__ void find(const ForwardContext<Config>& c, int stage) {
    note = BlockNote::of(c.shared.notes[stage]);
    if constexpr (Config::packed) {
      if (!note.block.whole) shown.bits = bits.of(note.block.tile);
    }
  }
  // Makes the note a uniform value for the compiler, by votes: every lane has the same note. Runs
  // beside the products of the block, which do not depend on it.
  __device__ __forceinline__ void agree() {
    note.last = __any_sync(0xffffffffu, note.last);
    note.block.whole = __any_sync(0xffffffffu, note.block.whole);
    note.block.tile = __shfl_sync(0xffffffffu, note.block.tile, 0);
    shown.every = note.block.whole;
    seen = {note.last ? note.block.tile : -1, note.block.tile + 1};
  }
  __device__ bool last_is_edge() const { return true; }  // mask() tests every block
};

template <class Config>
__device__ __forceinline__ void listed_tile(ForwardMath<Config>& math,
                                            const ForwardTile<Config>& tile,
                                            const QueuedItem<Config>& slot,
                                            ForwardState<Config>& state) {
  WarpgroupList<Config> blocks(math.c, tile, math.warpgroup, math.warp_row);
  math.first_scores(tile, blocks, state);
#pragma unroll 1
  while (!blocks.note.last) math.template step<true>(tile, blocks, state, 0);
  math.finish(tile, slot, blocks.row0, state);
}

}  // namespace cuflash::fa3
