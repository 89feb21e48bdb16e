// FlashAttention-3 backward: clears the accumulator of dQ. The blocks of kv tiles clear it for
// later blocks; an earlier kernel, steps/statistics.cu, clears only the first heads. The copy
// engine stores the zeros while the block multiplies. A separate kernel would be bound by device
// memory.
//
// Every kv tile, or slot in a list of them, has a share of its head's rows. The block of tile i
// clears the share of tile i + `ahead`, even if slot i of the list has no tile. Blocks start in the
// order of their numbers. `ahead` exceeds both the tiles of a head group (tile/schedule.cuh) and
// the number of blocks that run at once, so hardly any block waits; none waits for a later one.
//
// Who waits for whom:
//   HeadCounters::cleared  in device memory, for every kv head: a thread beside math for the blocks
//                          that clear the head's shares. It starts to poll as soon as the block
//                          begins, because an answer takes thousands of clocks
//   cleared                math for that thread, before it adds to dQ. In ordered sums the thread
//                          that watches for turns polls, and math waits for its turn
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/proxy_fence.cuh"
#include "../ptx/turn.cuh"
#include "backward_types.cuh"

namespace cuflash::fa3 {

// One thread waits until the counter has reached `count`.
template <class Config>
__device__ inline void await_count(const int* counter, int count) {
  jitter<Config>();
  const Patience<Config> patience;
  while (ptx::read_turn(counter) < count) patience.wait(40);
}

// One thread waits until the sums of this block's head are cleared. The kernel before has cleared
// those of the first heads.
template <class Config>
__device__ inline void await_cleared(const BackwardContext<Config>& c, unsigned tile) {
  if (tile < c.params.ahead) return;
  await_count<Config>(&counters_of(c.params, batch_of(c), c.item.head).cleared,
                      kv_tiles_of_head<Config>(c.params));
}

// The rows whose sums are one kv tile's share. If a kv head has n tiles, a share holds an n-th of
// the rows of every query head of the group.
struct RowShare {
  int batch;
  int kv_head;
  int row;  // the first
};

// Shares consist of units of sixteen rows of a query head.
constexpr int kRowsOfUnit = 16;

// The number of units of a query head, counting only rows to which kv tiles add; and the number of
// units of one tile's share of the query head.
template <class Config>
__device__ inline int units_of_head(const typename Config::Params& params) {
  if constexpr (Config::Lengths::packed) return params.padded_rows / kRowsOfUnit;
  return ceil_div(params.shape.seqlen_q, Config::block_q) * (Config::block_q / kRowsOfUnit);
}
template <class Config>
__device__ inline int units_of_share(const typename Config::Params& params) {
  return ceil_div(units_of_head<Config>(params), kv_tiles_of_head<Config>(params));
}

template <class Config>
__device__ inline RowShare share_of(const typename Config::Params& params, long long tile) {
  const WorkItem item = kv_order<Config>(params).template kv_item<Config::block_kv>(
      params.shape, static_cast<unsigned>(tile), Config::ordered);
  const int tile_of_head = item.kv_begin / Config::block_kv;
  return {item.entry, item.head, tile_of_head * units_of_share<Config>(params) * kRowsOfUnit};
}

// One thread copies zeros from shared memory to the sums of a share, as one group of copies.
template <class Config>
__device__ inline void store_zeros_of(const BackwardContext<Config>& c, const RowShare& share) {
  constexpr int bytes = Config::zero_bytes;  // of a copy
  constexpr int copies_of_unit = kRowsOfUnit * Config::head_dim * 4 / bytes;
  static_assert(copies_of_unit * bytes == kRowsOfUnit * Config::head_dim * 4, "whole copies");
  const auto& params = c.params;
  const int begin = share.row / kRowsOfUnit;
  const int units = min(units_of_share<Config>(params), units_of_head<Config>(params) - begin);
  for (int i = 0; i < c.group; ++i) {
    const long long head = static_cast<long long>(share.batch) * params.shape.heads_q +
                           share.kv_head * c.group + i;  // of all
    auto* to = static_cast<unsigned char*>(params.dq_accumulator) +
               (head * params.padded_rows + share.row) * (Config::head_dim * 4);
#pragma unroll 1
    for (int copy = 0; copy < units * copies_of_unit; ++copy, to += bytes) {
      ptx::bulk_store(to, ptx::shared_address(c.shared.zeros), bytes);
    }
  }
  ptx::bulk_commit();
}

// A warp clears the share of the tile that lies params.ahead tiles after its own, if there is one.
template <class Config>
__device__ inline void clear_role(const BackwardContext<Config>& c, unsigned tile) {
  const long long ahead = tile + c.params.ahead;
  if (ahead >= kv_tiles_of_all<Config>(c.params)) return;
#pragma unroll
  for (int i = 0; i < Config::zero_bytes / 16; i += 32) {
    c.shared.zeros[i + threadIdx.x % 32] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  const RowShare share = share_of<Config>(c.params, ahead);
  store_zeros_of(c, share);
  ptx::bulk_wait();
  ptx::fence_async_global();
  jitter<Config>();
  ptx::pass_turn(&counters_of(c.params, share.batch, share.kv_head).cleared);
}

}  // namespace cuflash::fa3
