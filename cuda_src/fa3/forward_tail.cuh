// FlashAttention-3 forward where sequences end before their array: the tail, which is the block of
// V that holds the last key.
//
// The load role loads it with `tail.raw` as its barrier. A warp beside load clears the rows beyond
// the last key and arrives at `v_full` in place of the copy engine. Each tile of a block has at
// most one tail.
#pragma once

#include "forward_types.cuh"

namespace cuflash::fa3 {

// The loading thread announces a tail to the clearing warp; the bytes then arrive at `tail.raw`.
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
  // Tells the warp that there are no more tails.
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
