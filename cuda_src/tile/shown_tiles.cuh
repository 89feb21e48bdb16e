// The tiles of pairs that a kernel skips because a term of the scores hides them entirely (`skips`
// of ScoreChain). Without such a term only the bounds of the keys exclude tiles.
#pragma once

#include "score.cuh"

namespace cuflash {

template <class Config>
__device__ inline bool shows_tile(const typename Config::Params& params, const Sequence& seq,
                                  int head, int q_tile, int kv_tile) {
  if constexpr (Config::Score::skips) {
    return Config::Score::List::shows(params, seq.entry, head, q_tile * Config::block_q,
                                      kv_tile * Config::block_kv);
  } else {
    return true;
  }
}

// The kv tiles from the first to the last that a q tile of a query head sees; some tiles between
// them may be hidden.
template <class Config>
__device__ inline KvRange shown_range(const typename Config::Params& params, const Sequence& seq,
                                      int head, int q_tile) {
  KvRange range = kv_range<Config>(seq, q_tile);
  if constexpr (Config::Score::skips) {
    while (range.begin < range.end && !shows_tile<Config>(params, seq, head, q_tile, range.begin)) {
      ++range.begin;
    }
    while (range.begin < range.end &&
           !shows_tile<Config>(params, seq, head, q_tile, range.end - 1)) {
      --range.end;
    }
  }
  return range;
}

// Whether a q tile of a query head sees no kv tile.
template <class Config>
__device__ inline bool is_dead_tile(const typename Config::Params& params, const Sequence& seq,
                                    int head, int q_tile) {
  const KvRange range = shown_range<Config>(params, seq, head, q_tile);
  return range.begin == range.end;
}

// The first q tile of a query head, from `q_tile` on, that sees a kv tile; at most `end`.
template <class Config>
__device__ inline int next_shown(const typename Config::Params& params, const Sequence& seq,
                                 int head, int q_tile, int end, int kv_tile) {
  if constexpr (Config::Score::skips) {
    while (q_tile < end && !shows_tile<Config>(params, seq, head, q_tile, kv_tile)) ++q_tile;
  }
  return q_tile;
}

}  // namespace cuflash
