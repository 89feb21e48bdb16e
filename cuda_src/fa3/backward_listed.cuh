// FlashAttention-3 backward where bits say, for each query head, which q tiles and which pairs of a
// kv tile are seen.
#pragma once

#include "../tile/score.cuh"

namespace cuflash::fa3 {

// The q tile of a step, and its query head.
struct QPlace {
  int head;
  int tile;
};

// The size of an array of bits. It has a line for every key, padded to whole kv tiles; a line has
// bits for a whole number of q tiles.
template <class Config>
__device__ inline int lines_of_bits(const Shape& shape) {
  return ceil_div(shape.seqlen_kv, Config::block_kv) * Config::block_kv;
}
template <class Config>
__device__ inline int tiles_of_bits(const Shape& shape) {
  return Config::one_row ? 1 : ceil_div(shape.seqlen_q, Config::block_q);
}

// A step, as the load role describes it.
struct StepNote {
  int head;
  int tile_and_every;  // 2 tile + whether no pair of the tile is hidden
  unsigned pairs;      // index of the bits of the kv tile's first 16 keys; without packed bits,
                       // what `shown_parts` returns
  int unused;

  __device__ int tile() const { return tile_and_every >> 1; }
  __device__ bool every() const { return (tile_and_every & 1) != 0; }
};

// The q tiles of a kv tile, for one query head of the group after the other; empty where q tiles
// are not listed.
template <class Config, bool = Config::listed>
struct ListedSteps {
  const typename Config::Params& listed_params;
  int kv_tile;
  int first_head;
  int end_head;
  HiddenPairs first;  // of the first head
  int array_step;     // from one head's array to the next head's
  int begin;          // of the q tiles within the bounds
  int end;
  int count;

  __device__ ListedSteps(const typename Config::Params& params, const WorkItem& item,
                         const Sequence& seq)
      : listed_params(params), kv_tile(item.kv_begin / Config::block_kv), count(0) {
    const int group = params.shape.heads_q / params.shape.heads_kv;
    const QBlocks<Config> blocks(seq, item.kv_begin);
    first_head = item.head * group;
    end_head = first_head + group;
    first = Config::Score::List::hidden(params, item.entry, first_head);
    array_step =
        Config::Score::List::hidden(params, item.entry, first_head + 1).array - first.array;
    begin = blocks.begin;
    end = blocks.end;
    for (int head = first_head; head < end_head; ++head) count += row(head).count(begin, end);
  }
  __device__ TileRow row(int head) const {
    const Shape& shape = listed_params.shape;
    return hidden(head).tile_row(kv_tile, ceil_div(shape.seqlen_kv, Config::block_kv),
                                 ceil_div(tiles_of_bits<Config>(shape), 32));
  }
  __device__ StepNote note(int batch, int head, const SeenTile& tile) const {
    const Shape& shape = listed_params.shape;
    if constexpr (!Config::packed) {
      unsigned shown = 0xffffffffu;
      if (!tile.whole && tile.tile < end) {
        shown = Config::Score::List::shown_parts(
            listed_params, batch, head, tile.tile * Config::block_q, kv_tile * Config::block_kv);
      }
      return {head, tile.tile * 2 + tile.whole, shown, 0};
    }
    const unsigned pairs = hidden(head).index_of(
        kv_tile * Config::block_kv, lines_of_bits<Config>(shape), tiles_of_bits<Config>(shape));
    return {head, tile.tile * 2 + tile.whole, pairs + tile.tile * 32, 0};
  }

 private:
  __device__ HiddenPairs hidden(int head) const {
    return {first.tiles, first.pairs, first.array + (head - first_head) * array_step};
  }
};
template <class Config>
struct ListedSteps<Config, false> {
  __device__ ListedSteps(const typename Config::Params&, const WorkItem&, const Sequence&) {}
};

// The load role's walk along the steps. Where steps are listed, the load role looks up each step
// before it is needed and notes it for the math roles, see BackwardStorage::notes.
template <class Context, bool listed>
struct StepWalk {
  const Context& c;
  QPlace place;
  StepNote note{};
  __device__ explicit StepWalk(const Context& c) : c(c), place(c.first()) {}
  __device__ void advance() { place = c.after(place); }
};
template <class Context>
struct StepWalk<Context, true> {
  const Context& c;
  TilesUp tiles;
  QPlace place;
  StepNote note;

  __device__ explicit StepWalk(const Context& c)
      : c(c), tiles(c.row(c.first_head), c.begin, c.end), place{c.first_head, 0} {
    advance();
  }
  // After the last step there is no tile.
  __device__ void advance() {
    SeenTile tile = tiles.next();
    while (tile.tile >= c.end && place.head + 1 < c.end_head) {
      tiles = TilesUp(c.row(++place.head), c.begin, c.end);
      tile = tiles.next();
    }
    place.tile = tile.tile;
    note = c.note(c.item.entry, place.head, tile);
  }
};

// For an array that is the same for all queries: whether some query head of the group sees the
// item's kv tile.
template <class Config>
__device__ inline bool is_seen(const typename Config::Params& params, const WorkItem& item,
                               int group) {
  const int tile = item.kv_begin / Config::block_kv;
  const int tiles = ceil_div(params.shape.seqlen_kv, Config::block_kv);
  bool seen = false;
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    const HiddenPairs hidden = Config::Score::List::hidden(params, item.entry, head);
    seen |= hidden.tile_row(tile, tiles, 1).count(0, 1) > 0;
  }
  return seen;
}

// The q tiles within the bounds of the item's kv tile; none where an array that is the same for all
// queries hides the tile.
template <class Config>
__device__ inline QBlocks<Config> seeing_blocks(const typename Config::Params& params,
                                                const WorkItem& item, const Sequence& seq) {
  if constexpr (Config::skips_keys) {
    QBlocks<Config> blocks(seq, item.kv_begin);
    const int group = params.shape.heads_q / params.shape.heads_kv;
    if (!is_seen<Config>(params, item, group)) blocks.end = blocks.begin;
    return blocks;
  } else {
    return QBlocks<Config>(seq, item.kv_begin);
  }
}

}  // namespace cuflash::fa3
