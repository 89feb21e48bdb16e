// For steps/bias_gradient.cu: the steps in which a block visits all pairs that it sums.
#pragma once

#include "../tile/shown_tiles.cuh"

namespace cuflash::steps {

// The range [begin, end), in order.
struct Walk {
  int begin;
  int end;
};

// What a block owns, and the ranges that it walks over.
template <class Config>
struct BiasItem {
  static constexpr bool whole = Config::by_rows && Config::by_keys;  // a result, no partial sum
  Walk entries;
  Walk heads;
  Walk q_tiles;
  Walk kv_tiles;
  int result_entry = 0;

  __device__ BiasItem(const typename Config::Params& params, unsigned block) {
    const Shape& shape = params.shape;
    q_tiles = {0, ceil_div(shape.seqlen_q, Config::block_q)};
    kv_tiles = {0, ceil_div(shape.seqlen_kv, Config::block_kv)};
    if constexpr (Config::by_keys) kv_tiles = own(block, kv_tiles.end);
    if constexpr (Config::by_rows) q_tiles = own(block, q_tiles.end);
    heads = whole && params.bias_heads == 1 ? Walk{0, shape.heads_q} : own(block, shape.heads_q);
    entries = own(block, whole ? static_cast<int>(params.bias_batch) : shape.batch);
    if constexpr (whole) {
      result_entry = entries.begin;
      const int shared = shape.batch / static_cast<int>(params.bias_batch);
      entries = {entries.begin * shared, (entries.begin + 1) * shared};
    }
  }

 private:
  // Splits the number `block` into the block's index, of `count` along an axis, and a rest. Returns
  // the index as a range, and leaves the rest in `block`.
  __device__ static Walk own(unsigned& block, int count) {
    const int index = static_cast<int>(block % count);
    block /= count;
    return {index, index + 1};
  }
};

// The steps of an item in order, without those that the mask hides entirely. A walker starts at its
// own number and takes every n-th step of n walkers.
template <class Config>
struct BiasSteps {
  const typename Config::Params* params;
  const BiasItem<Config>* item;
  int group;  // heads that share one of K and V
  int entry;
  int head;
  int q_tile;
  int kv_tile;
  int kv_end;  // of the tiles that the q tile sees
  Sequence seq;

  __device__ BiasSteps(const typename Config::Params& params, const BiasItem<Config>& item,
                       int walker)
      : params(&params),
        item(&item),
        group(params.shape.heads_q / max(1, params.shape.heads_kv)),
        entry(item.q_tiles.begin < item.q_tiles.end && item.heads.begin < item.heads.end
                  ? item.entries.begin
                  : item.entries.end),
        head(item.heads.begin),
        q_tile(item.q_tiles.begin) {
    static_assert(Config::walkers == 1 || BiasItem<Config>::whole, "steps of one tile");
    if (!exists()) return;
    next_heads(walker);
    skip_hidden();
  }

  __device__ bool exists() const { return entry < item->entries.end; }
  __device__ int kv_head() const { return head / group; }
  __device__ int q_begin() const { return q_tile * Config::block_q; }
  __device__ int kv_begin() const { return kv_tile * Config::block_kv; }

  __device__ void advance() {
    if constexpr (BiasItem<Config>::whole) {
      next_heads(Config::walkers);
    } else if (++kv_tile < kv_end && !leave_out_hidden()) {
      return;
    } else {
      next_q_tile();
    }
    skip_hidden();
  }

 private:
  // Goes on to the first kv tile that no term hides entirely; returns whether there is none.
  __device__ bool leave_out_hidden() {
    if constexpr (Config::Score::skips) {
      for (; kv_tile < kv_end; ++kv_tile) {
        if (shows_tile<Config>(*params, seq, head, q_tile, kv_tile)) return false;
      }
      return true;
    }
    return false;
  }
  __device__ void next_heads(int count) {
    head += count;
    while (head >= item->heads.end) {
      head -= item->heads.end - item->heads.begin;
      ++entry;
    }
  }
  __device__ void next_q_tile() {
    if (++q_tile == item->q_tiles.end) {
      q_tile = item->q_tiles.begin;
      next_heads(1);
    }
  }
  __device__ void skip_hidden() {
    while (exists()) {
      seq = sequence<Config>(*params, entry);
      const KvRange seen = kv_range<Config>(seq, q_tile);
      kv_tile = max(seen.begin, item->kv_tiles.begin);
      kv_end = min(seen.end, item->kv_tiles.end);
      if (kv_tile < kv_end && !leave_out_hidden()) return;
      if constexpr (BiasItem<Config>::whole) {
        next_heads(Config::walkers);
      } else {
        next_q_tile();
      }
    }
  }
};

}  // namespace cuflash::steps
