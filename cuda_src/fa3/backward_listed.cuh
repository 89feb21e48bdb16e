// FlashAttention-3 backward where an array lists the q tiles that see a kv tile, of each query
// head.
#pragma once

#include "../tile/score.cuh"

namespace cuflash::fa3 {

// The q tile of a step, and the query head it is of.
struct QPlace {
  int head;
  int tile;
};

// The q tiles of a kv tile, of one query head of the group after the other, for the load role: it
// tells the math roles which they are, see BackwardStorage::places. Nothing where q tiles are not
// listed.
template <class Config, bool = Config::listed>
struct ListedSteps {
  const TileBits* bits;  // of the first head
  int head_step;         // to those of the next one
  int first_head;
  int end_head;
  int begin;  // of the q tiles that bounds leave
  int end;
  int count;

  __device__ ListedSteps(const typename Config::Params& params, const WorkItem& item,
                         const Sequence& seq)
      : count(0) {
    const Shape& shape = params.shape;
    const int group = shape.heads_q / shape.heads_kv;
    const QBlocks<Config> blocks(seq, item.kv_begin);
    first_head = item.head * group;
    end_head = first_head + group;
    begin = blocks.begin;
    end = blocks.end;
    const int rows = ceil_div(shape.seqlen_kv, Config::block_kv);
    const int words = ceil_div(ceil_div(shape.seqlen_q, Config::block_q), 32);
    bits = Config::Score::List::tile_bits(params, item.batch, first_head,
                                          item.kv_begin / Config::block_kv, rows, words);
    head_step = static_cast<int>(Config::Score::List::tile_bits(params, item.batch, first_head + 1,
                                                                item.kv_begin / Config::block_kv,
                                                                rows, words) -
                                 bits);
    for (int head = first_head; head < end_head; ++head) count += row(head).count(begin, end);
  }
  __device__ TileRow row(int head) const {
    return {bits + static_cast<long long>(head - first_head) * head_step};
  }
  // Beyond the last one: no tile.
  __device__ QPlace after(QPlace place) const {
    int tile = row(place.head).first(place.tile + 1, end).tile;
    while (tile >= end && place.head + 1 < end_head) {
      tile = row(++place.head).first(begin, end).tile;
    }
    return {place.head, tile};
  }
};
template <class Config>
struct ListedSteps<Config, false> {
  __device__ ListedSteps(const typename Config::Params&, const WorkItem&, const Sequence&) {}
};

// Where one list of kv tiles is that of all q tiles: whether some query head of the group sees the
// item's kv tile.
template <class Config>
__device__ inline bool is_listed(const typename Config::Params& params, const WorkItem& item,
                                 int group) {
  const int tile = item.kv_begin / Config::block_kv;
  const int words = ceil_div(ceil_div(params.shape.seqlen_kv, Config::block_kv), 32);
  bool seen = false;
  for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
    const TileRow row{Config::Score::List::tile_bits(params, item.batch, head, 0, 1, words)};
    seen |= row.count(tile, tile + 1) > 0;
  }
  return seen;
}

// The q tiles that bounds leave to the item's kv tile; none where one list of kv tiles is that of
// all q tiles, and it is not in it.
template <class Config>
__device__ inline QBlocks<Config> listed_blocks(const typename Config::Params& params,
                                                const WorkItem& item, const Sequence& seq) {
  if constexpr (Config::one_list) {
    QBlocks<Config> blocks(seq, item.kv_begin);
    const int group = params.shape.heads_q / params.shape.heads_kv;
    if (!is_listed<Config>(params, item, group)) blocks.end = blocks.begin;
    return blocks;
  } else {
    return QBlocks<Config>(seq, item.kv_begin);
  }
}

}  // namespace cuflash::fa3
