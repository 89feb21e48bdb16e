// FlashAttention-3 backward: the tiles of a thread block, in shared memory and in registers.
#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/barrier_arrive.cuh"
#include "../ptx/deadline.cuh"
#include "../tile/copy.cuh"
#include "../tile/gradient_accumulator.cuh"
#include "../tile/pair_panels.cuh"
#include "../tile/pair_sums.cuh"
#include "../tile/panels.cuh"
#include "../tile/pipeline.cuh"
#include "../tile/product.cuh"
#include "../tile/score.cuh"
#include "../tile/softmax.cuh"
#include "../tile/store_staged.cuh"
#include "../tile/tail.cuh"
#include "backward_listed.cuh"
#include "backward_params.cuh"
#include "backward_parts.cuh"

namespace cuflash::fa3 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kKeysOfWarpgroup = 64;
constexpr int kRowsOfProduct = 64;  // rows that a warpgroup multiplies at once
constexpr int kTurnStages = 2;      // stages of the turns to add to dQ
constexpr int kNotes = 4;           // notes of steps; a step reads the previous step's note too

// Scores are keys x queries. Every math warpgroup has 64 keys of the kv tile, and every warp has 16
// of them: P, dS, dK and dV of these keys are in its registers, P and dS as left operands of dV and
// dK. dQ needs dS of all keys, which passes through shared memory. A warpgroup computes 64 rows of
// dQ or, where the q tile has only 64, a part of the columns.
//
// In wide heads two warpgroups can hold dK and dV of no more than 64 keys. They then share the
// keys: one has P and dV, the other dS and dK, see backward_wide.cuh. Where only K is wide, a
// warpgroup computes one tile of scores after the other and keeps dS only in shared memory, see
// backward_serial.cuh. Other kv tiles than of 64 or 128 keys are shared too, but there scores are
// queries x keys, see backward_across.cuh.
template <class Config>
struct BackwardTypes {
  using Storage = typename Config::Storage;
  static constexpr int warpgroups = 2;  // warpgroups of the math role
  static constexpr bool across = Config::block_kv % kKeysOfWarpgroup != 0;
  static constexpr bool keys_shared = across || Config::block_kv == kKeysOfWarpgroup;
  static constexpr bool serial = !keys_shared && Config::head_dim + Config::head_dim_v > 256;
  static constexpr int math_warps = 4 * warpgroups;
  static constexpr int threads = kWarpgroup * (warpgroups + 1);
  static constexpr bool q_parted_by_rows = Config::block_q == warpgroups * kRowsOfProduct;
  static constexpr int gradient_warps = keys_shared ? 4 : math_warps;  // warps that make dS
  // The columns of dQ that the first warpgroup computes; the other one's begin after them.
  static constexpr int q_columns = q_parted_by_rows ? Config::head_dim
                                   : across         ? kPanelColumns
                                   : keys_shared    ? 2 * kPanelColumns
                                                    : Config::head_dim / warpgroups;
  static_assert(keys_shared || Config::block_kv == warpgroups * kKeysOfWarpgroup,
                "64 keys for each warpgroup, or for both");
  static_assert(!keys_shared || Config::head_dim > q_columns, "both have columns of dQ");
  static_assert(q_parted_by_rows || Config::block_q == kRowsOfProduct, "dQ is parted evenly");

  using Scores = WarpTile<float, 16, 16, Config::block_q>;
  using KGradient = WarpTile<float, 16, 16, Config::head_dim>;
  using VGradient = WarpTile<float, 16, 16, Config::head_dim_v>;
  using QGradient = WarpTile<float, 16, 16, q_columns>;
  // The second warpgroup's columns of dQ where the warpgroups share keys.
  using LastQGradient = WarpTile<float, 16, 16, Config::head_dim - q_columns>;
  // Where each warpgroup multiplies with half of the columns of K, K lies in two halves.
  static constexpr int k_parts = q_parted_by_rows || keys_shared ? 1 : warpgroups;
  using KPanels = Panels<Storage, Config::block_kv, Config::head_dim, k_parts>;
  static_assert(q_parted_by_rows || KPanels::byte_of(q_columns) % KPanels::panel_bytes == 0,
                "a warpgroup's columns of K begin a panel");
  using VPanels = Panels<Storage, Config::block_kv, Config::head_dim_v>;
  using QPanels = Panels<Storage, Config::block_q, Config::head_dim>;
  using DoutPanels = Panels<Storage, Config::block_q, Config::head_dim_v>;
  using ScorePanels = Panels<Storage, Config::block_q, Config::block_kv>;
};

// Memory for 64 columns of each warp's dK or dV; in wide heads P passes through it.
template <class Config, bool = BackwardTypes<Config>::across>
struct Staging {
  using Type = StagedRows[BackwardTypes<Config>::math_warps];
};
// Where scores are queries x keys: P, [block_q, block_kv].
template <class Config>
struct Staging<Config, true> {
  using Type = typename BackwardTypes<Config>::ScorePanels;
};

// A number for each query of a tile, see steps/statistics.cu.
template <class Config>
struct alignas(16) QueryNumbers {
  float value[Config::block_q];
};

// Counters in device memory for the rows of a kv head: the number of its tiles whose shares are
// cleared, see backward_clear.cuh, and of those that have added to dQ, see backward_rows.cuh.
struct HeadCounters {
  int cleared;
  int summed;
};

// The barriers of the two stages of K and V where blocks stay, see backward_stay.cuh.
template <class Config, bool = Config::stays>
struct StayBarriers {};
template <class Config>
struct StayBarriers<Config, true> {
  Barrier k_full[2];
  Barrier v_full[2];
  Barrier kv_empty[2];
};

template <class Config, class Types = BackwardTypes<Config>>
struct BackwardStorage : OperandStorage<Config> {
  typename Types::KPanels k[1 + Config::stays];          // [block_kv, head_dim]
  typename Types::VPanels v[1 + Config::stays];          // [block_kv, head_dim_v]
  typename Types::QPanels q[Config::num_stages];         // [block_q, head_dim]
  typename Types::DoutPanels dout[Config::num_stages];   // [block_q, head_dim_v]
  typename Types::ScorePanels ds[Config::score_stages];  // [block_q, block_kv]
  typename Staging<Config>::Type staging;
  QueryNumbers<Config> lse[Config::num_stages];    // arrive with Q
  QueryNumbers<Config> delta[Config::num_stages];  // arrive with dO
  Barrier k_full;
  Barrier v_full;
  Barrier q_full[Config::num_stages];
  Barrier dout_full[Config::num_stages];
  Barrier ds_full[Config::score_stages];
  Barrier ds_empty[Config::score_stages];
  Barrier cleared;                 // see backward_clear.cuh
  Barrier turn_full[kTurnStages];  // see backward_turns.cuh; blocks of rows use `added` too
  Barrier turn_empty[kTurnStages];
  Barrier added[kTurnStages];
  StepNote notes[kNotes];      // notes of listed steps: arrive with Q
  TailBarrier<Config> k_tail;  // K arrives here if it has a tail
  StayBarriers<Config> stay;
  alignas(128) uint4 zeros[Config::zero_bytes / 16];  // copied to where dQ will be summed
};

// The named barriers. Barrier 0 is that of all threads. Each warpgroup has one, by its number in
// the block. Each stage has one, at which load waits for the end of the stage's step. In wide heads
// each buffer of P has two: it is filled, it is read. Where score tiles are serial, each warpgroup
// has one for its turn at P.
template <class Config>
struct NumberedBarriers {
  static constexpr int step = 1 + BackwardTypes<Config>::warpgroups;
  static constexpr int threads_of_step = 32 * (BackwardTypes<Config>::math_warps + 1);
  static constexpr int weights_full = step + Config::num_stages;
  static constexpr int weights_empty = weights_full + Config::score_stages;
  static constexpr int scores = weights_empty + Config::score_stages;
  static_assert(scores + BackwardTypes<Config>::warpgroups <= 16, "there are 16");
};

// Every warp of math calls end_step() when it has read Q, dO, lse and delta. Every lane has read,
// so every lane arrives; on an mbarrier the arrivals of a warp would take as long as 32 single
// ones.
template <class Config>
__device__ __forceinline__ void end_step(unsigned stage) {
  jitter<Config>();
  ptx::named_barrier_arrive(NumberedBarriers<Config>::step + stage,
                            NumberedBarriers<Config>::threads_of_step);
}

// The load role's warp calls it once for every step: a barrier left in the middle of a phase would
// break the next block.
template <class Config>
__device__ __forceinline__ void await_step(unsigned stage) {
  jitter<Config>();
  ptx::named_barrier(NumberedBarriers<Config>::step + stage,
                     NumberedBarriers<Config>::threads_of_step);
}

// The backoff of a thread that polls a counter. In jitter builds it times out and traps.
template <class Config, bool ends = Config::jitter>
struct Patience {
  __device__ static void wait(unsigned nanoseconds) { __nanosleep(nanoseconds); }
};
template <class Config>
struct Patience<Config, true> {
  const ptx::Deadline deadline;
  __device__ void wait(unsigned nanoseconds) const {
    __nanosleep(nanoseconds);
    deadline.check();
  }
};

// The stage and phase of a step in a ring, from its number alone.
template <int stages>
struct RingPlace {
  unsigned stage;
  unsigned phase;
  __device__ explicit RingPlace(int step)
      : stage(static_cast<unsigned>(step) % stages),
        phase(static_cast<unsigned>(step) / stages % 2) {}
};

// Where a term of the scores reads an array: waits for the array's tile of a step. The warp's keys
// begin at `key` in this tile.
template <class Config>
__device__ __forceinline__ StagedLane await_tile(OperandStorage<Config>& shared, int step,
                                                 int key) {
  if constexpr (Config::operand_stages > 0) {
    const RingPlace<Config::operand_stages> ring(step);
    wait<Config>(shared.operand_full[ring.stage], ring.phase);
    const auto& panels = shared.operand[ring.stage];
    return {panels.data, panels.panel_bytes, 0, key, true};
  } else {
    return {};
  }
}
// A warp has read the array's tile.
template <class Config>
__device__ __forceinline__ void release_tile(OperandStorage<Config>& shared, int step) {
  if constexpr (Config::operand_stages > 0) {
    __syncwarp();
    arrive_warp<Config>(shared.operand_empty[RingPlace<Config::operand_stages>(step).stage]);
  }
}

// The steps and tiles that a block has finished before its kv tile; none if it has only one tile.
template <class Config, bool = Config::stays>
struct Earlier {
  static constexpr int steps_before = 0;
};
template <class Config>
struct Earlier<Config, true> {
  int steps_before;
  unsigned tiles_before;
  // The stage and phase of the tile's K and V.
  __device__ unsigned kv_place() const { return tiles_before % 2; }
  __device__ unsigned kv_phase() const { return tiles_before / 2 % 2; }
};

// The context of all roles: the kv tile, and its steps, which visit the q tiles that see it, for
// one query head of the group after the other; a cut has some of these steps, see CutSteps.
// `item.head` is the kv head, or one of its parts.
template <class Config>
struct BackwardContext : ListedSteps<Config>, Earlier<Config>, CutSteps<Config> {
  const typename Config::Params& params;
  BackwardStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const QBlocks<Config> blocks;
  const int group;

  __device__ int steps() const {
    if constexpr (Config::listed) return this->count;
    if constexpr (Config::cut) return this->cut_count;
    return (blocks.end - blocks.begin) * group;
  }
  __device__ QPlace first() const {
    if constexpr (Config::cut) {
      const int tiles = max(1, blocks.end - blocks.begin);
      const int heads = this->cut_begin / tiles;
      return {kv_head() * group + heads, blocks.begin + this->cut_begin - heads * tiles};
    }
    return {item.head * group, blocks.begin};
  }
  __device__ QPlace after(const QPlace& place) const {
    const bool last = place.tile + 1 == blocks.end;
    return {place.head + last, last ? blocks.begin : place.tile + 1};
  }
  __device__ QPlace before(const QPlace& place) const {
    const bool first = place.tile == blocks.begin;
    return {place.head - first, first ? blocks.end - 1 : place.tile - 1};
  }
  // The note of a listed step, valid once its Q has arrived.
  __device__ StepNote& note_of(int step) const {
    static_assert(Config::num_stages + 2 <= kNotes, "a note is read before it is written again");
    return shared.notes[static_cast<unsigned>(step) % kNotes];
  }
  // The head of K and V.
  __device__ int kv_head() const {
    if constexpr (Config::parted && !Config::cut_last) {
      // Unsigned: with signed numbers ptxas takes a register that math needs.
      const auto parts = static_cast<unsigned>(params.parts);
      return static_cast<int>(static_cast<unsigned>(item.head) / parts);
    } else {
      return item.head;
    }
  }
  // Row of the workspace where a head's rows begin.
  __device__ long long head_row(int head) const {
    return padded_row(params.shape, seq, head, params.padded_rows);
  }
};

template <class Config>
__device__ inline unsigned kv_tiles_of_all(const typename Config::Params& params) {
  return static_cast<unsigned>(kv_tiles_of_head<Config>(params)) * params.shape.batch *
         params.shape.heads_kv;
}

template <class Config>
__device__ inline TileOrder<> kv_order(const typename Config::Params& params) {
  return {static_cast<unsigned>(kv_tiles_of_head<Config>(params)),
          static_cast<unsigned>(params.shape.heads_kv), static_cast<unsigned>(params.head_group)};
}

__device__ inline HeadCounters& counters_of(const Fa3BackwardParams& params, int batch,
                                            int kv_head) {
  return static_cast<HeadCounters*>(params.turns)[batch * params.shape.heads_kv + kv_head];
}

// The batch entry of the tensors.
template <class Config>
__device__ inline int batch_of(const BackwardContext<Config>& c) {
  return Config::Lengths::packed ? c.seq.batch : c.item.entry;
}

// Row of dk_parts and dv_parts where the block's keys begin.
template <class Config>
__device__ inline long long part_row(const BackwardContext<Config>& c) {
  if constexpr (Config::cut_last) return c.cut_place * c.params.padded_keys;
  const long long head =
      static_cast<long long>(c.seq.batch) * c.params.shape.heads_kv + c.item.head;
  return head * c.params.padded_keys + c.item.kv_begin;
}

template <class Config>
__device__ inline BackwardContext<Config> context_of(const typename Config::Params& params,
                                                     BackwardStorage<Config>& shared,
                                                     const PlacedTile<Config>& placed,
                                                     const Earlier<Config>& earlier = {}) {
  const auto [item, seq] =
      kv_item_of<Config>(params, kv_order<Config>(params), placed.tile, Config::ordered);
  return {{params, item, seq},
          earlier,
          {params, item, seq, placed},
          params,
          shared,
          item,
          seq,
          seeing_blocks<Config>(params, item, seq),
          group_of<Config>(params)};
}

// A warp's state in the steps.
struct StepState {
  QPlace place;          // of the step; dQ of the one before is under way
  unsigned dead_before;  // a bit for each of this lane's two rows of that dQ: its query is dead
  ShownPairs shown;      // the step's pairs that an array of bits shows
  unsigned drawn[2];     // of the step, where weights are dropped: see StepBits

  // Where blocks stay: the value of `dead_before` before the first step of a tile. The number of
  // this step need not be 0.
  static constexpr unsigned first_step = 0x80000000u;
  __device__ explicit StepState(const QPlace& first, bool stays)
      : place(first), dead_before(stays ? first_step : 0) {}
  // Where blocks stay: whether an earlier step of this tile has been done.
  __device__ bool has_before() const { return dead_before != first_step; }
};

// Whether a step of this number exists. Every lane has the same answer; where steps are listed, a
// vote tells the compiler, which then keeps the addresses derived from the number in uniform
// registers.
template <class Config>
__device__ __forceinline__ bool is_step(int step, int steps) {
  if constexpr (Config::listed) return __any_sync(0xffffffffu, step < steps);
  return step < steps;
}

// One thread initialises every barrier with the number of arrivals of a phase.
template <class Config, class Types = BackwardTypes<Config>>
__device__ inline void init_barriers(BackwardStorage<Config>& shared) {
  const auto init = [](Barrier& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  init(shared.k_full, 1);
  if constexpr (Config::Lengths::vary) init(shared.k_tail.raw, 1);
  init(shared.v_full, 1);
  init(shared.cleared, 1);
  if constexpr (Config::stays) {
    for (int place = 0; place < 2; ++place) {
      init(shared.stay.k_full[place], 1);
      init(shared.stay.v_full[place], 1);
      init(shared.stay.kv_empty[place], Types::math_warps);
    }
  }
  for (int stage = 0; stage < Config::num_stages; ++stage) {
    init(shared.q_full[stage], 1);
    init(shared.dout_full[stage], 1);
  }
  for (int stage = 0; stage < Config::score_stages; ++stage) {
    init(shared.ds_full[stage], Types::gradient_warps);
    init(shared.ds_empty[stage], Types::math_warps);
  }
  for (int stage = 0; stage < kTurnStages; ++stage) {
    init(shared.turn_full[stage], 1);
    init(shared.turn_empty[stage], 1);
    init(shared.added[stage], Types::math_warps);
  }
  init_operand_barriers<Config>(shared, Types::math_warps);
  ptx::mbarrier_init_fence();
}

}  // namespace cuflash::fa3
