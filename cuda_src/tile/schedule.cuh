// Which work a thread block does, and which blocks its inner loop visits. Loading and arithmetic
// go through the same iterator, so that a new way of choosing blocks changes this file alone.
#pragma once

#include "mask.cuh"

namespace cuflash {

// One thread block's share: a head of a batch entry and a range of its keys. FlashAttention-1
// takes all of a head; q_tile and split belong to schedules that part it further.
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

// The kv tiles that a q tile sees are [0, this); 0 for a tile of dead rows.
template <class Config>
__device__ inline int kv_tiles_seen(const Sequence& seq, int q_tile) {
  const int last_query = min((q_tile + 1) * Config::block_q, seq.seqlen_q) - 1;
  return ceil_div(Mask<Config>::visible_end(seq, last_query), Config::block_kv);
}

}  // namespace cuflash
