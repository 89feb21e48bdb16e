// Which work a thread block does, and which blocks its inner loop visits. Loading and arithmetic
// go through the same iterator, so that a new way of choosing blocks changes this file alone.
#pragma once

#include "mask.cuh"

namespace cuflash {

// One thread block's share: a head of a batch entry, one of its q tiles and a range of its keys.
// FlashAttention-1 takes all of a head, FlashAttention-2 a q tile of it, or the keys of a kv tile;
// split belongs to schedules that part the keys of a q tile.
struct WorkItem {
  int batch;
  int head;
  int q_tile;
  int kv_begin;
  int kv_end;
  int split;
};

// One block an (batch, head) pair of `heads` heads, in the order of the grid.
__device__ inline WorkItem head_work_item(const Shape& shape, int heads) {
  const int batch = blockIdx.x / heads;
  return {batch, static_cast<int>(blockIdx.x) % heads, 0, 0, shape.seqlen_kv, 0};
}

// One block a tile, `tiles` tiles of each of `heads` heads of every batch entry. Heads come in
// sections of `section`, whose other operands the second-level cache holds together; in a section
// the tiles come first that are longest under a causal mask: the last q tiles, the first kv tiles.
// Where kv tiles add to dQ in turn the last ones come first, as they have the first turns.
struct TileOrder {
  unsigned tiles;
  unsigned heads;
  unsigned section;

  __device__ WorkItem q_item(const Shape& shape, unsigned block) const {
    WorkItem item = place(shape, block);
    item.q_tile = static_cast<int>(tiles) - 1 - item.q_tile;
    return item;
  }

  template <int block_kv>
  __device__ WorkItem kv_item(const Shape& shape, unsigned block, bool last_tile_first) const {
    WorkItem item = place(shape, block);
    const int tile = last_tile_first ? static_cast<int>(tiles) - 1 - item.q_tile : item.q_tile;
    item.kv_begin = tile * block_kv;
    item.kv_end = min(item.kv_begin + block_kv, shape.seqlen_kv);
    item.q_tile = 0;
    return item;
  }

 private:
  __device__ WorkItem place(const Shape& shape, unsigned block) const {
    const unsigned first = block / (section * tiles) * section;
    const unsigned width = min(section, shape.batch * heads - first);
    const unsigned within = block - first * tiles;
    const unsigned head = first + within % width;
    return {static_cast<int>(head / heads),
            static_cast<int>(head % heads),
            static_cast<int>(within / width),
            0,
            shape.seqlen_kv,
            0};
  }
};

// One step of an inner loop.
struct Block {
  int index;  // of the tile along the looped axis
  bool edge;  // some pair in it is masked
};

// The q tiles that see a kv tile: [begin, end).
template <class Config>
struct QBlocks {
  Sequence seq;
  int kv_begin;
  int begin;
  int end;

  __device__ QBlocks(const Sequence& seq, int kv_begin)
      : seq(seq), kv_begin(kv_begin), end(ceil_div(seq.seqlen_q, Config::block_q)) {
    const int first = Mask<Config>::first_query_seeing(seq, kv_begin);
    begin = first < seq.seqlen_q ? first / Config::block_q : end;
  }

  __device__ Block operator[](int index) const {
    return {index, Mask<Config>::is_edge(seq, index * Config::block_q, kv_begin)};
  }
};

// The kv tiles that a q tile sees, last first: those that need masking come before the others.
template <class Config>
struct KvBlocks {
  Sequence seq;
  int q_begin;
  int count;

  __device__ KvBlocks(const Sequence& seq, int q_tile);

  __device__ Block operator[](int step) const {
    const int index = count - 1 - step;
    return {index, Mask<Config>::is_edge(seq, q_begin, index * Config::block_kv)};
  }
};

// The kv tiles that a q tile sees are [0, this); 0 for a tile of dead rows.
template <class Config>
__device__ inline int kv_tiles_seen(const Sequence& seq, int q_tile) {
  const int last_query = min((q_tile + 1) * Config::block_q, seq.seqlen_q) - 1;
  return ceil_div(Mask<Config>::visible_end(seq, last_query), Config::block_kv);
}

template <class Config>
__device__ inline KvBlocks<Config>::KvBlocks(const Sequence& seq, int q_tile)
    : seq(seq), q_begin(q_tile * Config::block_q), count(kv_tiles_seen<Config>(seq, q_tile)) {}

}  // namespace cuflash
