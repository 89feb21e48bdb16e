// FlashAttention-1 backward: the parts of one step of Algorithm 4 that FlashAttention-2 does not
// share.
#pragma once

#include "backward_types.cuh"

namespace cuflash::fa1 {

// The log-sum-exp of a query; minus infinity if it is dead.
template <class Config>
__device__ inline typename Config::Compute lse_of(const BackwardContext<Config>& c,
                                                  const QStep& step, int row) {
  using Compute = typename Config::Compute;
  const Compute lse =
      *row_number<const typename Config::Statistics>(c.params.lse, c.seq, step.head, row);
  return lse_or_dead<Config>(c.seq, row, lse);
}

// Copies Q_i and dO_i to their stage of shared memory (line 10), as one group of copies. Returns
// whether one of the rows that this thread reads is dead, or the tile reaches beyond the length;
// the threads of the block together read all rows.
template <class Config>
__device__ inline bool load_q_step(const BackwardContext<Config>& c, const QStep& step) {
  using Storage = typename Config::Storage;
  constexpr int threads = BackwardTypes<Config>::threads;
  const int rows = c.seq.seqlen_q - step.q_begin;
  copy_tile<Config::copies, threads>(
      c.q(step.stage), q_row<const Storage>(c.params.q, c.seq, step.head, step.q_begin),
      c.params.q.row_stride, rows, c.params.shape.head_dim);
  copy_tile<Config::copies, threads>(
      c.dout(step.stage), q_row<const Storage>(c.params.dout, c.seq, step.head, step.q_begin),
      c.params.dout.row_stride, rows, c.params.shape.head_dim_v);
  commit_copies<Config::copies>();
  bool dead = rows < Config::block_q;
  for (int row = threadIdx.x; row < min(Config::block_q, rows);
       row += BackwardTypes<Config>::threads) {
    dead |= lse_of(c, step, step.q_begin + row) == -infinity<typename Config::Compute>();
  }
  return dead;
}

// Calls function(row in the tile) for the dead rows of a q tile, shared out among the threads of
// the block. Rows beyond the length count as dead.
template <class Config, class Function>
__device__ inline void for_dead_rows(const BackwardContext<Config>& c, const QStep& step,
                                     Function function) {
  const int rows = c.seq.seqlen_q - step.q_begin;
  for (int row = threadIdx.x; row < Config::block_q; row += BackwardTypes<Config>::threads) {
    if (row >= rows ||
        lse_of(c, step, step.q_begin + row) == -infinity<typename Config::Compute>()) {
      function(row);
    }
  }
}

// Clears the dead rows of a tile in shared memory.
template <class Config, class Tile>
__device__ inline void clear_dead_rows(const BackwardContext<Config>& c, const QStep& step,
                                       const Tile& tile) {
  for_dead_rows(c, step, [&](int row) { clear_row(tile, row); });
}

// Clears the dead rows of `dq`.
template <class Config>
__device__ inline void store_dead_rows(const BackwardContext<Config>& c, const QStep& step) {
  using Storage = typename Config::Storage;
  for_dead_rows(c, step, [&](int row) {
    if (step.q_begin + row >= c.seq.rows_q) return;
    Storage* to = q_row<Storage>(c.params.dq, c.seq, step.head, step.q_begin + row);
    for (int i = 0; i < c.params.shape.head_dim; ++i) to[i] = Storage(0.0f);
  });
}

// The log-sum-exp, in the units of the logits, and delta of a warp's rows. A dead row, and one
// beyond the length, gets an lse of plus infinity: its P is then exp(-inf) = 0.
template <class Config>
struct StepStatistics {
  const BackwardContext<Config>& c;
  const QStep& step;
  using Compute = typename Config::Compute;
  using Rows = typename BackwardTypes<Config>::Rows;
  __device__ Rows lse_of(int row0) const {
    return rows_of(row0, [&](int row) {
      Compute x = -infinity<Compute>();
      if (row < c.seq.seqlen_q) x = fa1::lse_of(c, step, row);
      return x == -infinity<Compute>() ? infinity<Compute>() : Logits<Config>::from_natural(x);
    });
  }
  __device__ Rows delta_of(int row0) const {
    const auto* delta = static_cast<const Compute*>(c.params.delta);
    const long long first = workspace_row(c.params.shape, c.seq, step.head, 0);
    return rows_of(row0, [&](int row) { return row < c.seq.seqlen_q ? delta[first + row] : 0; });
  }

 private:
  template <class Number>
  __device__ Rows rows_of(int row0, Number number) const {
    const LanePosition lane;
    Rows rows;
    rows.for_each([&](Compute& x, int m, int group) {
      x = number(step.q_begin + row0 + lane.row + BackwardTypes<Config>::Scores::row(m, group));
    });
    return rows;
  }
};

// dQ_i += dS_ij K_j (line 21): reads it from the workspace, except at the first kv tile, and writes
// it back, or, at the last kv tile that the q tile sees, to `dq`.
template <class Config>
__device__ inline void accumulate_q(const BackwardContext<Config>& c, const QStep& step, bool first,
                                    bool last) {
  using Compute = typename Config::Compute;
  using Gradient = typename BackwardTypes<Config>::QGradient;
  const typename BackwardTypes<Config>::QGrid warp;
  if (!warp.active) return;
  const int row0 = warp.row * Gradient::rows;
  const int column0 = warp.column * Gradient::columns;
  const int valid_rows = c.seq.seqlen_q - (step.q_begin + row0);
  Compute* accumulator = c.dq_accumulator(step.head, step.q_begin + row0) + column0;
  Gradient dq;
  load_tile(dq, accumulator, Config::head_dim, first ? 0 : valid_rows);
  Products<Config>::template multiply<Config::block_kv>(dq, rows_by_depth(c.ds(), row0),
                                                        depth_by_rows(c.k(), column0));
  if (!last) {
    store_tile(dq, accumulator, Config::head_dim, valid_rows);
    return;
  }
  store_rounded<Config::copies != CopyKind::element>(
      dq, q_row<typename Config::Storage>(c.params.dq, c.seq, step.head, step.q_begin + row0),
      c.params.dq.row_stride, valid_rows, column0, c.params.shape.head_dim,
      static_cast<Compute>(c.params.scale));
}

// Clears the gradient of the queries of a tile that sees no key.
template <class Config>
__device__ inline void store_dead_tile(const BackwardContext<Config>& c, int head, int q_tile) {
  const int begin = q_tile * Config::block_q;
  store_zeros<Config::copies != CopyKind::element, BackwardTypes<Config>::threads,
              Config::head_dim>(q_row<typename Config::Storage>(c.params.dq, c.seq, head, begin),
                                c.params.dq.row_stride, min(Config::block_q, c.seq.rows_q - begin),
                                c.params.shape.head_dim);
}

}  // namespace cuflash::fa1
