// FlashAttention-2 backward: the parts of one step that FlashAttention-1 does not share.
#pragma once

#include "../ptx/turn.cuh"
#include "backward_loads.cuh"

namespace cuflash::fa2 {

// Whether a q tile that has arrived reaches beyond the length, or holds a dead row among those this
// lane reads. The lanes of a warp read all rows.
template <class Config>
__device__ inline bool sees_dead_row(const BackwardContext<Config>& c, const QStep& step) {
  const auto* lse = c.lse(step.stage);
  bool dead = step.q_begin + Config::block_q > c.seq.seqlen_q;
  for (int row = ptx::opaque_lane(); row < Config::block_q; row += 32) {
    dead |= lse[row] == infinity<typename Config::Compute>();
  }
  return dead;
}

// The threads of the block clear the dead rows of a tile in shared memory.
template <class Config, class Tile>
__device__ inline void clear_dead_rows(const BackwardContext<Config>& c, const QStep& step,
                                       const Tile& tile) {
  for (int row = threadIdx.x; row < Config::block_q; row += BackwardTypes<Config>::threads) {
    if (c.lse(step.stage)[row] == infinity<typename Config::Compute>()) clear_row(tile, row);
  }
}

template <class Config>
__device__ inline void arrive_step() {
  wait_copies<Config::workspace_copies, 0>();
  __syncthreads();
}

// Clears the dead rows of Q and dO of a step; returns whether there are any. Every warp combines
// `seen` of its lanes, and all warps get the same answer.
template <class Config>
__device__ inline bool clear_inputs(const BackwardContext<Config>& c, const QStep& step,
                                    bool seen) {
  const bool dead = __any_sync(0xffffffffu, seen);
  if (dead) {
    clear_dead_rows(c, step, c.q(step.stage));
    clear_dead_rows(c, step, c.dout(step.stage));
    __syncthreads();
  }
  return dead;
}

// lse and delta of this warp's rows of a step, from shared memory.
template <class Config>
struct StepStatistics {
  const typename Config::Compute* lse;
  const typename Config::Compute* delta;
  using Rows = typename BackwardTypes<Config>::Rows;
  __device__ Rows lse_of(int row0) const { return rows_of(lse, row0); }
  __device__ Rows delta_of(int row0) const { return rows_of(delta, row0); }

 private:
  __device__ static Rows rows_of(const typename Config::Compute* numbers, int row0) {
    const LanePosition lane;
    Rows rows;
    rows.for_each([&](typename Config::Compute& x, int m, int group) {
      x = numbers[row0 + lane.row + BackwardTypes<Config>::Scores::row(m, group)];
    });
    return rows;
  }
};

// Computes P and dS of a step into their stage.
template <class Config>
__device__ inline void score_step(const BackwardContext<Config>& c, const QStep& step, int i) {
  score_tiles<Config>(c, step, c.item.kv_begin, c.p(i), c.ds(i),
                      StepStatistics<Config>{c.lse(step.stage), c.delta(step.stage)});
}

// This warp's counter for its part of a q tile.
template <class Config>
__device__ inline int* turn_of(const BackwardContext<Config>& c, const QStep& step) {
  const long long tile = (c.head_row(step.head) + step.q_begin) / Config::block_q;
  return static_cast<int*>(c.params.turns) + tile * Config::warps + threadIdx.x / 32;
}

// Ordered accumulation: the kv tiles add to a q tile one after the other, from the first on or,
// where the mask has a bound, from the last on. Under a causal mask a kv tile begins with the q
// tile on its diagonal, so the kv tiles of a head that start together add to different q tiles.
// Several of them add to one q tile only where the first queries see several kv tiles.
//
// GPUs start the blocks of a grid in the order of their numbers (no manual promises it), and the
// tiles are numbered in the order in which they add. A block therefore waits only for blocks that
// run or have run.
template <class Config>
constexpr bool last_tile_first = Config::ordered && Mask<Config>::kind != MaskKind::full;

template <class Config>
__device__ inline int turn_number(const BackwardContext<Config>& c, const QStep& step) {
  const int tile = c.item.kv_begin / Config::block_kv;
  return last_tile_first<Config> ? kv_range<Config>(c.seq, step.q_tile).end - 1 - tile : tile;
}

template <class Config>
__device__ inline void await_turn(const BackwardContext<Config>& c, const QStep& step) {
  if constexpr (Config::ordered) {
    if (ptx::opaque_lane() == 0) {
      const int* turn = turn_of(c, step);
      const int number = turn_number(c, step);
      while (ptx::read_turn(turn) != number) {
      }
    }
    __syncwarp();
  }
}

// The turn that a warp must still pass on. It does so a step later: by then its additions have
// arrived, and the warp does not wait for them.
template <bool ordered>
struct OpenTurn {
  int* counter = nullptr;
  __device__ void pass() const {
    __syncwarp();
    if (ptx::opaque_lane() == 0 && counter != nullptr) ptx::pass_turn(counter);
  }
  __device__ void open(int* next) { counter = next; }
};
template <>
struct OpenTurn<false> {
  __device__ void pass() const {}
};

// dQ_i += dS_ij K_j in device memory; nothing is added to dead rows.
template <class Config>
__device__ inline void accumulate_q(const BackwardContext<Config>& c, const QStep& step, int i,
                                    bool dead, OpenTurn<Config::ordered>& open) {
  using Compute = typename Config::Compute;
  using Gradient = typename BackwardTypes<Config>::QGradient;
  const typename BackwardTypes<Config>::QGrid warp;
  if (!warp.active) return;
  const int row0 = warp.row * Gradient::rows;
  const int column0 = warp.column * Gradient::columns;
  Gradient dq;
  dq.fill(0);
  using KTile = typename BackwardTypes<Config>::KTile;
  const auto keys = depth_by_rows(c.k(), part_offset<KTile, Gradient::columns>(warp.column));
  if constexpr (Config::transposed) {
    const auto tile = c.ds_transposed(i);
    const auto queries = part_offset<decltype(c.ds_transposed(0)), Gradient::rows>(warp.row);
    Products<Config>::template multiply_ahead<Config::block_kv>(dq, depth_by_rows(tile, queries),
                                                                keys);
  } else {
    Products<Config>::template multiply_ahead<Config::block_kv>(dq, rows_by_depth(c.ds(i), row0),
                                                                keys);
  }
  open.pass();
  await_turn(c, step);
  auto* accumulator = static_cast<Compute*>(c.params.dq_accumulator);
  const long long head_row = c.head_row(step.head);
  if (dead) {
    const Compute* lse = c.lse(step.stage) + row0;
    add_to_accumulator<Config, ByRows>(accumulator, dq, head_row, step.q_begin + row0, column0,
                                       [&](int row) { return lse[row] == infinity<Compute>(); });
  } else {
    add_to_accumulator<Config, ByRows>(accumulator, dq, head_row, step.q_begin + row0, column0,
                                       [](int) { return false; });
  }
  if constexpr (Config::ordered) open.open(turn_of(c, step));
}

// The warps copy a tile of shared memory to the kv tile's rows of a tensor; they divide the rows.
template <class Config, class Tile>
__device__ inline void copy_out_kv(const BackwardContext<Config>& c, const Tile& tile,
                                   const Tensor& tensor, int columns) {
  constexpr int rows = Config::block_kv / Config::warps;
  const int row0 = static_cast<int>(threadIdx.x) / 32 * rows;
  copy_out(tile, row0, rows,
           kv_row<typename Config::Storage>(tensor, c.seq, c.item.head, c.item.kv_begin + row0),
           tensor.row_stride, c.seq.rows_kv - c.item.kv_begin - row0, columns);
}

// Stores the finished dK_j and dV_j as whole rows of the tensors, through the shared memory of K
// and V, which no warp reads any more.
template <class Config, class KGradient, class VGradient>
__device__ inline void store_gradients(const BackwardContext<Config>& c, KGradient& dk,
                                       VGradient& dv) {
  if constexpr (Config::copies == CopyKind::element) {
    store_kv<Config>(c, c.params.dk, c.params.shape.head_dim, c.item.kv_begin, c.params.scale, dk);
    store_kv<Config>(c, c.params.dv, c.params.shape.head_dim_v, c.item.kv_begin,
                     value_factor<Config>(c.params), dv);
  } else {
    using Types = BackwardTypes<Config>;
    const auto factor = static_cast<typename Config::Compute>(c.params.scale);
    dk.for_each([&](typename Config::Compute& x, int, int, int, int) { x *= factor; });
    if constexpr (Config::Weights::drops) {
      const auto of_values = static_cast<typename Config::Compute>(value_factor<Config>(c.params));
      dv.for_each([&](typename Config::Compute& x, int, int, int, int) { x *= of_values; });
    }
    const typename Types::KvGrid warp;
    __syncthreads();
    if (warp.active) {
      store_shared<Config::architecture>(
          dk, c.k(), warp.row * KGradient::rows,
          part_offset<typename Types::KTile, KGradient::columns>(warp.column));
      store_shared<Config::architecture>(
          dv, c.v(), warp.row * VGradient::rows,
          part_offset<typename Types::VTile, VGradient::columns>(warp.column));
    }
    __syncthreads();
    copy_out_kv(c, c.k(), c.params.dk, c.params.shape.head_dim);
    copy_out_kv(c, c.v(), c.params.dv, c.params.shape.head_dim_v);
  }
}

}  // namespace cuflash::fa2
