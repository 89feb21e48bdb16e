// FlashAttention-3 forward where not every key counts: the block of V that the last key lies in.
//
// The load role has it arrive at `tail.raw`; a warp beside it clears the rows that do not count and
// arrives at `v_full` in the copy engine's place. A block has one tail for each of its tiles.
#pragma once

#include "forward_types.cuh"

namespace cuflash::fa3 {

// By the thread that loads: tells the warp of a matrix, whose bytes then arrive at `tail.raw`.
template <class Config>
struct TailLoads {
  PipelineState<1> place;

  __device__ void announce(TailStorage<Config>& tail, int stage, int count, unsigned bytes) {
    wait_empty<Config>(tail.cleared, place.phase);
    tail.stage = stage;
    tail.count = count;
    arrive_expecting<Config>(tail.raw, bytes);  // releases the writes above
    place.advance();
  }
  // There are no more.
  __device__ void end(TailStorage<Config>& tail) { announce(tail, -1, 0, 0); }
};

template <class Config>
__device__ inline void tail_role(const ForwardContext<Config>& c) {
  TailStorage<Config>& tail = c.shared.tail;
  PipelineState<1> place;
#pragma unroll 1
  while (true) {
    wait<Config>(tail.raw, place.phase);
    const int stage = tail.stage;
    if (stage < 0) break;
    clear_rows<32>(c.shared.v[stage], tail.count);
    __syncwarp();
    arrive_warp<Config>(c.shared.v_full[stage]);
    arrive<Config>(tail.cleared);  // by every lane, since each has read `tail`
    place.advance();
  }
}

}  // namespace cuflash::fa3
