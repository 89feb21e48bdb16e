// The work of a thread block, and the blocks that its inner loop visits. Loads and arithmetic take
// their range from the same function. FlashAttention-3's forward pass divides the range further, in
// fa3/forward_math.cuh.
#pragma once

#include "mask.cuh"

namespace cuflash {

// One thread block's work: a head of a batch entry, one of its q tiles and a range of its keys.
// FlashAttention-1 takes a whole head; FlashAttention-2 takes a q tile of it, or the keys of a kv
// tile. `split` belongs to schedules that divide the keys of a q tile.
struct WorkItem {
  int entry;  // of the batch, or the number of a packed sequence
  int head;
  int q_tile;
  int kv_begin;
  int kv_end;
  int split;
};

// One block for each (batch, head) pair of `heads` heads, in the order of the grid.
__device__ inline WorkItem head_work_item(const Shape& shape, int heads) {
  const int batch = blockIdx.x / heads;
  return {batch, static_cast<int>(blockIdx.x) % heads, 0, 0, shape.seqlen_kv, 0};
}

// One block for each tile, `tiles` tiles of each of `heads` heads of every batch entry. Heads come
// in groups of `head_group`; the second-level cache holds the other operands of a group together.
// Within a group the tiles that are longest under a causal mask come first: the last q tiles, the
// first kv tiles. Where kv tiles add to dQ in order the last kv tiles come first, because they add
// first. With `entries_inside` the order runs over all batch entries of one head before the next
// head: the entries share what is read with the head.
template <bool entries_inside = false>
struct TileOrder {
  unsigned tiles;
  unsigned heads;
  unsigned head_group;

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
    const unsigned first = block / (head_group * tiles) * head_group;
    const unsigned width = min(head_group, shape.batch * heads - first);
    const unsigned within = block - first * tiles;
    const unsigned head = first + within % width;
    if constexpr (entries_inside) {
      const unsigned entries = shape.batch;
      return {static_cast<int>(head % entries),
              static_cast<int>(head / entries),
              static_cast<int>(within / width),
              0,
              shape.seqlen_kv,
              0};
    }
    return {static_cast<int>(head / heads),
            static_cast<int>(head % heads),
            static_cast<int>(within / width),
            0,
            shape.seqlen_kv,
            0};
  }
};

// The items of a q tile: one for each chunk where the keys are split.
template <class Config>
__device__ inline unsigned items_of_tile(const typename Config::Params& params) {
  if constexpr (Config::Chunks::split) {
    return Config::Chunks::items_of_tile(params);
  } else {
    return 1;
  }
}
// The number of items of a head: of the q tiles of all sequences where the batch is packed.
template <class Config>
__device__ inline unsigned q_tiles_of_head(const typename Config::Params& params) {
  if constexpr (Config::Lengths::packed) {
    return Config::Lengths::q_items(params)[0].entry * items_of_tile<Config>(params);
  } else {
    return ceil_div(params.shape.seqlen_q, Config::block_q) * items_of_tile<Config>(params);
  }
}
// The number of kv tiles of a head; for packed sequences, the most that the list has room for.
template <class Config>
__device__ inline int kv_tiles_of_head(const typename Config::Params& params) {
  if constexpr (Config::Lengths::packed) {
    return most_tiles(params.shape.seqlen_kv, params.packed_lengths.entries + 1, Config::block_kv);
  } else {
    return ceil_div(params.shape.seqlen_kv, Config::block_kv);
  }
}

// A work item and its sequence.
struct PlacedItem {
  WorkItem item;
  Sequence seq;
};
// The item of a block, in the order of all tiles; for packed sequences a list holds the tiles.
template <class Config, bool entries_inside>
__device__ inline PlacedItem q_item_of(const typename Config::Params& params,
                                       const TileOrder<entries_inside>& order, unsigned block) {
  WorkItem item = order.q_item(params.shape, block);
  if constexpr (Config::Chunks::split) item = Config::Chunks::placed(params, item);
  if constexpr (Config::Lengths::packed) {
    const unsigned tiles = order.tiles / items_of_tile<Config>(params);
    const auto listed = Config::Lengths::q_items(params)[tiles - item.q_tile];
    const Sequence seq = Config::Lengths::of_item(params, listed);
    item.entry = seq.entry;
    item.q_tile = listed.tile;
    return {item, seq};
  } else {
    return {item, sequence<Config>(params, item.entry)};
  }
}
template <class Config>
__device__ inline PlacedItem kv_item_of(const typename Config::Params& params,
                                        const TileOrder<>& order, unsigned block,
                                        bool last_tile_first) {
  constexpr int block_kv = Config::block_kv;
  if constexpr (Config::Lengths::packed) {
    WorkItem item = order.kv_item<block_kv>(params.shape, block, false);
    const auto listed = params.packed_lengths.kv_items[1 + item.kv_begin / block_kv];
    item.entry = listed.entry;
    item.kv_begin = listed.tile * block_kv;
    item.kv_end = item.kv_begin + block_kv;
    return {item, Config::Lengths::of_item(params, listed)};
  } else {
    const WorkItem item = order.kv_item<block_kv>(params.shape, block, last_tile_first);
    return {item, sequence<Config>(params, item.entry)};
  }
}
// Whether the item lies past the end of the list, so that the block has no tile.
__device__ inline bool is_behind_the_list(const WorkItem& item) { return item.entry < 0; }

// One step of an inner loop.
struct Block {
  int index;  // of the tile along the looped axis
  bool edge;  // some pair in it is masked
};

template <class Config>
__device__ inline bool is_edge_tile(const Sequence& seq, int q_begin, int kv_begin) {
  return Mask<Config>::template is_edge<Config::block_q, Config::block_kv>(seq, q_begin, kv_begin);
}

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
    if (Config::Lengths::vary && kv_begin >= seq.seqlen_kv) begin = end;
    if constexpr (Mask<Config>::has_first) {
      const int kv_last = min(kv_begin + Config::block_kv, seq.seqlen_kv) - 1;
      const int queries = Mask<Config>::end_of_queries_seeing(seq, kv_last);
      end = max(begin, ceil_div(queries, Config::block_q));
    }
  }

  __device__ Block operator[](int index) const {
    return {index, is_edge_tile<Config>(seq, index * Config::block_q, kv_begin)};
  }
};

// Tiles of keys: [begin, end).
struct KvRange {
  int begin;
  int end;
};

// The kv tiles with a key that some query of a q tile may see. A kv tile is in the range of a q
// tile exactly if the q tile is in the QBlocks of the kv tile; ordered sums depend on that.
template <class Config>
__device__ inline KvRange kv_range(const Sequence& seq, int q_tile) {
  const int q_begin = q_tile * Config::block_q;
  const int last_query = min(q_begin + Config::block_q, seq.seqlen_q) - 1;
  if (Config::Lengths::vary && q_begin > last_query) return {0, 0};
  const int end = ceil_div(Mask<Config>::visible_end(seq, last_query), Config::block_kv);
  if constexpr (Mask<Config>::has_first) {
    const int first_key = Mask<Config>::visible_begin(seq, q_begin);
    return {first_key < seq.seqlen_kv ? min(first_key / Config::block_kv, end) : end, end};
  } else {
    return {0, end};
  }
}

// Whether a q tile visits no kv tile.
template <class Config>
__device__ inline bool is_dead_tile(const Sequence& seq, int q_tile) {
  const KvRange range = kv_range<Config>(seq, q_tile);
  return range.begin == range.end;
}

// The kv tiles that a q tile sees, last first: under a causal mask the tiles that need masking come
// before the others.
template <class Config>
struct KvBlocks {
  Sequence seq;
  int q_begin;
  KvRange range;

  __device__ KvBlocks(const Sequence& seq, int q_tile)
      : seq(seq), q_begin(q_tile * Config::block_q), range(kv_range<Config>(seq, q_tile)) {}

  // Only the tiles of one chunk of the keys, where the keys are split.
  __device__ KvBlocks(const typename Config::Params& params, const Sequence& seq,
                      const WorkItem& item)
      : KvBlocks(seq, item.q_tile) {
    if constexpr (Config::Chunks::split) {
      range = Config::Chunks::template cut<Config>(params, range, item.split);
    }
  }

  // If ranges begin at 0, the end is the count. A subtraction would change ptxas' registers.
  __device__ int count() const {
    return Mask<Config>::has_first || Config::Chunks::split ? range.end - range.begin : range.end;
  }

  __device__ Block operator[](int step) const {
    const int index = range.end - 1 - step;
    return {index, is_edge_tile<Config>(seq, q_begin, index * Config::block_kv)};
  }
};

}  // namespace cuflash
