// FlashAttention-3 forward where an array lists the blocks of keys that a q tile sees: both roles
// walk the same list, and what an array hides whole is neither loaded nor computed.
#pragma once

#include "forward_load.cuh"
#include "forward_math.cuh"

namespace cuflash::fa3 {

// The blocks of a tile, last first: at least one, which may be hidden. For a whole warp, or for the
// thread that loads.
template <class Config, bool of_warp>
struct ListedBlocks {
  TileRow row;
  int begin;
  SeenTile block;  // of this step
  SeenTile next;

  __device__ ListedBlocks(const ForwardContext<Config>& c, const ForwardTile<Config>& tile)
      : row(row_of(c, tile.item)), begin(tile.kv.begin) {
    block = before(tile.kv.end);
    if (block.tile < begin) block = {tile.kv.end - 1, false};
    next = before(block.tile);
  }
  __device__ bool is_last() const { return next.tile < begin; }
  __device__ void advance() {
    block = next;
    next = before(block.tile);
  }

 private:
  __device__ static TileRow row_of(const ForwardContext<Config>& c, const WorkItem& item) {
    const Shape& shape = c.params.shape;
    const int rows = Config::one_list ? 1 : ceil_div(shape.seqlen_q, Config::block_q);
    const int words = ceil_div(ceil_div(shape.seqlen_kv, Config::block_kv), 32);
    return {Config::Score::List::tile_bits(c.params, item.batch, item.head,
                                           Config::one_list ? 0 : item.q_tile, rows, words)};
  }
  // In a warp the same in every lane, and known to be: loops and products depend on it.
  __device__ SeenTile before(int end) const {
    const SeenTile found = row.last(begin, end);
    if constexpr (!of_warp) return found;
    const int both = __shfl_sync(0xffffffffu, found.tile * 2 + found.whole, 0);
    return {both >> 1, (both & 1) != 0};
  }
};

// Whether what comes tile by tile is loaded for a block.
template <class Config>
__device__ inline bool loads_operand(const SeenTile& block) {
  return !Config::Score::staged_hides || !block.whole;
}

// As load_role. Of a block whose pairs are all shown nothing is loaded that hides them.
template <class Config>
__device__ inline void load_listed_role(const ForwardContext<Config>& c) {
  const Shape& shape = c.params.shape;
  const auto order = q_order(c);
  const int tiles = static_cast<int>(order.tiles) * shape.heads_q * shape.batch;
  ForwardLoader<Config> loader(c);
  ForwardTile<Config> tile = c.tile(order.q_item(shape, blockIdx.x));
  ListedBlocks<Config, false> blocks(c, tile);
  loader.pass_on(tile.item);
  loader.load_k(tile, blocks.block.tile, loads_operand<Config>(blocks.block));
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
      loader.load_k(tile, blocks.block.tile, loads_operand<Config>(blocks.block));
      loader.load_v(tile, before);
    }
    const int number = tile_of_ticket(c.params.tile_counter, ticket, tiles);
    if (number >= tiles) break;
    const ForwardTile<Config> next = c.tile(order.q_item(shape, number));
    loader.pass_on(next.item);
    loader.load_v(tile, blocks.block.tile);
    tile = next;
    blocks = ListedBlocks<Config, false>(c, tile);
    loader.load_k(tile, blocks.block.tile, loads_operand<Config>(blocks.block));
    loader.load_q(tile);
  }
  loader.pass_on(no_item());
  loader.load_v(tile, blocks.block.tile);
}

// The same for a warpgroup, which computes every block of the list.
template <class Config>
struct WarpgroupList : ListedBlocks<Config, true> {
  int row0;      // of the warpgroup
  KvRange seen;  // blocks that are left; of more than this step's the first is not known

  __device__ WarpgroupList(const ForwardContext<Config>& c, const ForwardTile<Config>& tile,
                           int warpgroup)
      : ListedBlocks<Config, true>(c, tile),
        row0(tile.q_begin() + warpgroup * kRowsOfWarpgroup),
        seen(left()) {}
  __device__ void advance() {
    ListedBlocks<Config, true>::advance();
    seen = left();
  }
  __device__ bool last_is_edge() const { return true; }  // blocks are looked at one by one

 private:
  __device__ KvRange left() const {
    const int tile = this->block.tile;
    return {this->is_last() ? tile : -1, tile + 1};
  }
};

template <class Config>
__device__ __forceinline__ void listed_tile(ForwardMath<Config>& math,
                                            const ForwardTile<Config>& tile,
                                            ForwardState<Config>& state) {
  WarpgroupList<Config> blocks(math.c, tile, math.warpgroup);
  math.first_scores(tile, blocks, state);
#pragma unroll 1
  while (!blocks.is_last()) {
    blocks.advance();
    math.template step<true>(tile, blocks, state, blocks.block.tile);
  }
  math.finish(tile, blocks.row0, state);
}

}  // namespace cuflash::fa3
