// FlashAttention-3 backward, dQ summed in a fixed order: the kv tiles that a q tile sees add to it
// one after the other, the last one first, in the order in which their blocks start. A counter of
// every q tile says how many have added. Two warps do nothing but keep the turns, so that math
// reads no counter and does not wait for its additions to arrive.
//
// Who waits for whom, for each of two stages:
//   turn_full    math for the warp that watches: it is this block's turn to add dQ of a step
//   added        the warp that passes turns on for every warp of math: its additions are under way
//   turn_empty   the warp that watches for the one that passes on: the stage is free
#pragma once

#include "backward_rows.cuh"

namespace cuflash::fa3 {

// The counter of a q tile.
template <class Config>
__device__ inline int* turn_of(const BackwardContext<Config>& c, const QPlace& place) {
  const Shape& shape = c.params.shape;
  auto* heads = static_cast<HeadCounters*>(c.params.turns);
  heads += shape.batch * shape.heads_kv;
  return reinterpret_cast<int*>(heads) + c.head_row(place.head) / Config::block_q + place.tile;
}

// One thread waits for this block's turn at every step.
template <class Config>
__device__ inline void watch_role(const BackwardContext<Config>& c) {
  const int tile = c.item.kv_begin / Config::block_kv;
  const int steps = c.steps();
  QPlace place = c.first();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const RingPlace<kTurnStages> ring(step);
    wait_empty<Config>(c.shared.turn_empty[ring.stage], ring.phase);
    const int before = kv_range<Config>(c.seq, place.tile).end - 1 - tile;
    const Patience<Config> patience;
    while (ptx::read_turn(turn_of(c, place)) != before) patience.wait(20);
    arrive<Config>(c.shared.turn_full[ring.stage]);
    place = c.after(place);
  }
}

// One thread gives the turn to the next block once all warps have issued their additions;
// pass_turn() orders the additions before it.
template <class Config>
__device__ inline void pass_role(const BackwardContext<Config>& c) {
  const int steps = c.steps();
  QPlace place = c.first();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const RingPlace<kTurnStages> ring(step);
    wait<Config>(c.shared.added[ring.stage], ring.phase);
    ptx::pass_turn(turn_of(c, place));
    arrive<Config>(c.shared.turn_empty[ring.stage]);
    place = c.after(place);
  }
  if constexpr (Config::kv_tiles_per_convert_block > 0) pass_sums(c);
}

}  // namespace cuflash::fa3
