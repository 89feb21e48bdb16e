// FlashAttention-3 forward: the tiles of a thread block, in shared memory and in registers.
#pragma once

#include "../tile/pair_panels.cuh"
#include "../tile/panels.cuh"
#include "../tile/product.cuh"
#include "../tile/score.cuh"
#include "../tile/softmax.cuh"
#include "../tile/store_staged.cuh"
#include "../tile/stored.cuh"
#include "../tile/tail.cuh"
#include "../tile/tile_io.cuh"
#include "../tile/tile_queue.cuh"
#include "params.cuh"

namespace cuflash::fa3 {

constexpr int kWarpgroup = 128;       // threads
constexpr int kRowsOfWarpgroup = 64;  // of queries

// Every math warpgroup has 64 rows of the q tile, every warp 16 of them: their scores, weights and
// output are in its registers.
template <class Config>
struct ForwardTypes {
  using Storage = typename Config::Storage;
  static constexpr int warpgroups = Config::block_q / kRowsOfWarpgroup;  // that do the arithmetic
  static constexpr int math_warps = 4 * warpgroups;
  static constexpr int threads = kWarpgroup * (warpgroups + 1);
  static_assert(Config::block_q % kRowsOfWarpgroup == 0, "whole warpgroups");

  using Scores = WarpTile<float, 16, 16, Config::block_kv>;
  using Output = WarpTile<float, 16, 16, Config::head_dim_v>;
  using Rows = RowValues<Scores>;
  using QPanels = Panels<Storage, kRowsOfWarpgroup, Config::head_dim>;
  using KPanels = Panels<Storage, Config::block_kv, Config::head_dim>;
  using VPanels = Panels<Storage, Config::block_kv, Config::head_dim_v>;
};

// Where keys and values are stored in bytes: the warps that convert them, and the ring in which the
// bytes arrive, see forward_stored.cuh.
constexpr int kConvertingWarps = 3;  // of the load role's warpgroup, all but the one that loads
enum class StoredKind { none, keys, values };
template <class Config>
using StoredK = BytePanels<Config::block_kv, Config::head_dim>;
template <class Config>
using StoredV = BytePanels<Config::block_kv, Config::head_dim_v>;

template <class Config, bool = Config::Stored::converts>
struct StoredBytes {
  struct alignas(1024) Stage {
    unsigned char data[StoredK<Config>::bytes > StoredV<Config>::bytes ? StoredK<Config>::bytes
                                                                       : StoredV<Config>::bytes];
  };
  Stage stored_bytes[Config::stored_stages];
};
template <class Config>
struct StoredBytes<Config, false> {};

template <class Config, bool = Config::Stored::converts>
struct StoredRing {
  Barrier full[Config::stored_stages];
  Barrier empty[Config::stored_stages];
  StoredKind kind[Config::stored_stages];  // none after the last matrix
  int count[Config::stored_stages];        // rows up to the last valid key
};
template <class Config>
struct StoredRing<Config, false> {};

template <class Config, class Types = ForwardTypes<Config>>
struct ForwardStorage : OperandStorage<Config>, StoredBytes<Config> {
  using Storage = typename Config::Storage;
  typename Types::QPanels q[Config::q_stages][Types::warpgroups];  // [64, head_dim]
  typename Types::KPanels k[Config::num_stages];                   // [block_kv, head_dim]
  typename Types::VPanels v[Config::num_stages];                   // [block_kv, head_dim_v]
  StagedRows out[Types::math_warps];                               // 64 columns of a warp's output
  Barrier q_full[Config::q_stages][Types::warpgroups];
  Barrier q_empty[Config::q_stages][Types::warpgroups];
  Barrier k_full[Config::num_stages];
  Barrier k_empty[Config::num_stages];
  Barrier v_full[Config::num_stages];
  Barrier v_empty[Config::num_stages];
  TileQueueStorage<Config> queue;
  int notes[Config::num_stages];  // notes of listed blocks: arrive with K
  TailStorage<Config> tail;       // the tail of V, see forward_tail.cuh
  StoredRing<Config> stored;
};

// An item, with the lengths of its sequence and the range of its kv tiles.
template <class Config>
struct ForwardTile {
  WorkItem item;
  Sequence seq;
  KvRange kv;   // kv tiles that the load role loads: at least one, except in a chunk without keys,
                // which is skipped
  int kv_head;  // stored, so that load divides once a tile and not once a block

  __device__ int q_begin() const { return item.q_tile * Config::block_q; }
};

// The context of both roles.
template <class Config, class Types = ForwardTypes<Config>>
struct ForwardContext {
  const typename Config::Params& params;
  ForwardStorage<Config>& shared;

  __device__ ForwardTile<Config> tile(const WorkItem& item, const Sequence& seq) const {
    const Shape& shape = params.shape;
    KvRange kv = kv_range<Config>(seq, item.q_tile);
    kv.end = max(1, kv.end);
    if constexpr (Mask<Config>::has_first) kv.begin = min(kv.begin, kv.end - 1);
    if constexpr (Config::Chunks::split) {
      kv = Config::Chunks::template cut<Config>(params, kv, item.split);
    }
    return {item, seq, kv, item.head / (shape.heads_q / shape.heads_kv)};
  }
  __device__ ForwardTile<Config> tile(const PlacedItem& placed) const {
    return tile(placed.item, placed.seq);
  }
  __device__ ForwardTile<Config> tile(const QueuedItem<Config>& queued) const {
    return tile(queued.item, queued.sequence_of(params));
  }
};

// One thread initialises every barrier with the number of arrivals of a phase.
template <class Config, class Types = ForwardTypes<Config>>
__device__ inline void init_barriers(ForwardStorage<Config>& shared) {
  const auto init = [](Barrier& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int stage = 0; stage < Config::q_stages; ++stage) {
    for (int w = 0; w < Types::warpgroups; ++w) {
      init(shared.q_full[stage][w], 1);
      init(shared.q_empty[stage][w], 4);
    }
  }
  constexpr int fillers = Config::Stored::converts ? kConvertingWarps : 1;
  for (int stage = 0; stage < Config::num_stages; ++stage) {
    init(shared.k_full[stage], fillers);
    init(shared.v_full[stage], fillers);
    init(shared.k_empty[stage], Types::math_warps);
    init(shared.v_empty[stage], Types::math_warps);
  }
  init_operand_barriers<Config>(shared, Types::math_warps);
  init_tile_queue(shared.queue, Types::math_warps);
  if constexpr (Config::Lengths::vary) {
    init(shared.tail.raw, 1);
    init(shared.tail.cleared, 32);
  }
  if constexpr (Config::Stored::converts) {
    for (int stage = 0; stage < Config::stored_stages; ++stage) {
      init(shared.stored.full[stage], 1);
      init(shared.stored.empty[stage], kConvertingWarps);
    }
  }
  ptx::mbarrier_init_fence();
}

}  // namespace cuflash::fa3
