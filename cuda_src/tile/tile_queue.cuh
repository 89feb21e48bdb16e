// The tiles of a persistent block, one after the other. The first has the block's number. The load
// role draws the others from a counter in device memory and passes them on through a ring of two
// slots: it has time for the divisions, and the math role does not. The last ticket of a launch
// sets the counter back to zero.
#pragma once

#include "pipeline.cuh"
#include "schedule.cuh"

namespace cuflash {

// An item as the load role passes it on; with its sequence where lengths are in device memory.
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

// One thread initialises the queue, before any use of it.
template <class Config>
__device__ inline void init_tile_queue(TileQueueStorage<Config>& storage, int reading_warps) {
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(ptx::shared_address(&storage.full[i]), 1);
    ptx::mbarrier_init(ptx::shared_address(&storage.empty[i]), 32 * reading_warps);
  }
}

// Every block draws once for each tile it computes, so a launch draws `tiles` tickets in all. A
// block waits for the ticket only where it uses it.
__device__ inline int draw_ticket(void* counter) {
  return atomicAdd(static_cast<int*>(counter), 1);
}

// The tile of a ticket; `tiles` or more if no tile is left. No block reads the counter after the
// last ticket.
__device__ inline int tile_of_ticket(void* counter, int ticket, int tiles) {
  if (ticket == tiles - 1) *static_cast<int*>(counter) = 0;
  return ticket + static_cast<int>(gridDim.x);
}

// The item that stands for the end of the tiles.
__device__ inline WorkItem no_item() { return {0, 0, -1, 0, 0, 0}; }
__device__ inline bool is_item(const WorkItem& item) { return item.q_tile >= 0; }

// Passes an item to the reading warps; for the one thread that draws.
template <class Config>
__device__ inline void pass_on_item(TileQueueStorage<Config>& storage, PipelineState<2>& place,
                                    const QueuedItem<Config>& item) {
  wait_empty<Config>(storage.empty[place.stage], place.phase);
  storage.item[place.stage] = item;
  arrive<Config>(storage.full[place.stage]);  // releases the item to the waiting warps
  place.advance();
}

// Every reading warp calls it once it has read an item. Every lane reads, so every lane arrives.
// With one arrival for all lanes ptxas would keep more of the loop over blocks of keys in vector
// registers, which costs up to 5 % at head_dim 128.
template <class Config>
__device__ inline void release_item(TileQueueStorage<Config>& storage, PipelineState<2>& place) {
  if (threadIdx.x % 32 != 0) arrive<Config>(storage.empty[place.stage]);
  arrive_warp<Config>(storage.empty[place.stage]);
  place.advance();
}

// Every reading warp calls it. All lanes get the same tile. Where loops depend on it, the shuffle
// makes it a uniform value for the compiler. An item with a sequence stays in its slot until the
// slot is released: the end of a tile reads the item again, so it takes no register meanwhile.
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
