// The tiles of a persistent block, one after the other. The first is the block's own number; the
// others are drawn from a counter in device memory by the load role, which passes on what they
// stand for through a ring of two slots: it has time for the divisions, the math role has not. The
// last ticket of a launch sets the counter back to zero.
#pragma once

#include "pipeline.cuh"
#include "schedule.cuh"

namespace cuflash {

// An item as it is passed on; where lengths are in device memory, with its sequence.
template <class Config, bool = Config::Lengths::vary>
struct QueuedItem {
  WorkItem item;
  Sequence seq;
  __device__ Sequence sequence_of(const typename Config::Params&) const { return seq; }
};
template <class Config>
struct QueuedItem<Config, false> {
  WorkItem item;
  __device__ Sequence sequence_of(const typename Config::Params& params) const {
    return sequence<Config>(params, item.entry);
  }
};

template <class Config>
struct TileQueueStorage {
  Barrier full[2];
  Barrier empty[2];
  QueuedItem<Config> item[2];
};

// By one thread, before anyone uses the queue.
template <class Config>
__device__ inline void init_tile_queue(TileQueueStorage<Config>& storage, int reading_warps) {
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&storage.full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&storage.empty[i]), 32 * reading_warps);
  }
}

// Every block draws once for each tile it does, so `tiles` tickets are drawn in all. Nothing waits
// for the answer before it is used.
__device__ inline int draw_ticket(void* counter) {
  return atomicAdd(static_cast<int*>(counter), 1);
}

// The tile of a ticket; `tiles` or more if there are no more. After the last ticket nobody looks at
// the counter any more.
__device__ inline int tile_of_ticket(void* counter, int ticket, int tiles) {
  if (ticket == tiles - 1) *static_cast<int*>(counter) = 0;
  return ticket + static_cast<int>(gridDim.x);
}

// What is passed on when there are no more tiles.
__device__ inline WorkItem no_item() { return {0, 0, -1, 0, 0, 0}; }
__device__ inline bool is_item(const WorkItem& item) { return item.q_tile >= 0; }

// By the one thread that draws.
template <class Config>
__device__ inline void pass_on_item(TileQueueStorage<Config>& storage, PipelineState<2>& place,
                                    const QueuedItem<Config>& item) {
  wait_empty<Config>(storage.empty[place.stage], place.phase);
  storage.item[place.stage] = item;
  arrive<Config>(storage.full[place.stage]);  // releases the write above to whoever waits
  place.advance();
}

// By every reading warp that has read an item. Every lane reads, so every lane arrives; where all
// of them arrive by one instruction ptxas keeps more of the loop over blocks of keys in vector
// registers, and at head_dim 128 that costs up to 5 %.
template <class Config>
__device__ inline void release_item(TileQueueStorage<Config>& storage, PipelineState<2>& place) {
  if (threadIdx.x % 32 != 0) arrive<Config>(storage.empty[place.stage]);
  arrive_warp<Config>(storage.empty[place.stage]);
  place.advance();
}

// By every reading warp. The same in all its lanes, and known to be where loops depend on it. One
// that comes with its sequence stays in its slot until it is released: what the end of a tile needs
// is then read again, and takes no register meanwhile.
template <class Config>
__device__ inline QueuedItem<Config> next_item(TileQueueStorage<Config>& storage,
                                               PipelineState<2>& place) {
  wait<Config>(storage.full[place.stage], place.phase);
  QueuedItem<Config> queued = storage.item[place.stage];
  queued.item.q_tile = __shfl_sync(0xffffffffu, queued.item.q_tile, 0);
  if constexpr (!Config::Lengths::vary) release_item<Config>(storage, place);
  return queued;
}

}  // namespace cuflash
