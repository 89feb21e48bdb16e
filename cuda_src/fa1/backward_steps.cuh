// FlashAttention-1 backward: the parts of one step of Algorithm 4, in the order they happen.
#pragma once

#include "backward_types.cuh"

namespace cuflash::fa1 {

// K_j and V_j -> shared memory (line 7).
template <class Config>
__device__ inline void load_kv_tile(const BackwardContext<Config>& c, int kv_begin) {
  using Storage = typename Config::Storage;
  constexpr int threads = BackwardTypes<Config>::threads;
  const int rows = c.seq.seqlen_kv - kv_begin;
  copy_tile<Config::copies, threads>(
      c.k(), kv_row<const Storage>(c.params.k, c.seq, c.item.head, kv_begin), c.params.k.row_stride,
      rows, c.params.shape.head_dim);
  copy_tile<Config::copies, threads>(
      c.v(), kv_row<const Storage>(c.params.v, c.seq, c.item.head, kv_begin), c.params.v.row_stride,
      rows, c.params.shape.head_dim_v);
}

// The log-sum-exp of a query.
template <class Config>
__device__ inline typename Config::Compute lse_of(const BackwardContext<Config>& c,
                                                  const QStep& step, int row) {
  return *row_number<const typename Config::Statistics>(c.params.lse, c.seq, step.head, row);
}

// Q_i and dO_i -> their stage of shared memory (line 10). One group of copies. Says whether one of
// the rows that this thread looks at is dead, or the tile reaches beyond the length; the threads of
// the block together look at all rows.
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
  for (int row = threadIdx.x; row < min(Config::block_q, rows); row += threads) {
    dead |= lse_of(c, step, step.q_begin + row) == -infinity<typename Config::Compute>();
  }
  return dead;
}

// The dead rows of a q tile, dealt to the threads of the block: function(row in the tile). Rows
// beyond the length count as dead.
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

// Zeros in the dead rows of a tile in shared memory.
template <class Config, class Tile>
__device__ inline void clear_dead_rows(const BackwardContext<Config>& c, const QStep& step,
                                       const Tile& tile) {
  for_dead_rows(c, step, [&](int row) {
    for (int i = 0; i < Tile::columns; ++i) tile.at(row, i) = typename Tile::Element(0.0f);
  });
}

// Zeros in the dead rows of `dq`.
template <class Config>
__device__ inline void store_dead_rows(const BackwardContext<Config>& c, const QStep& step) {
  using Storage = typename Config::Storage;
  for_dead_rows(c, step, [&](int row) {
    if (step.q_begin + row >= c.seq.seqlen_q) return;
    Storage* to = q_row<Storage>(c.params.dq, c.seq, step.head, step.q_begin + row);
    for (int i = 0; i < c.params.shape.head_dim; ++i) to[i] = Storage(0.0f);
  });
}

// The log-sum-exp, in the units of the logits, and delta of this warp's rows. A dead row, and one
// beyond the length, gets plus infinity: its P is then exp(-inf) = 0.
template <class Config, class Rows>
__device__ inline void load_statistics(const BackwardContext<Config>& c, const QStep& step,
                                       int row0, Rows& lse, Rows& delta) {
  using Compute = typename Config::Compute;
  const LanePosition lane;
  const int first_row = step.q_begin + row0 + lane.row;
  lse.for_each([&](Compute& x, int m, int group) {
    const int row = first_row + BackwardTypes<Config>::Scores::row(m, group);
    x = -infinity<Compute>();
    delta.value[m][group] = 0;
    if (row < c.seq.seqlen_q) {
      x = lse_of(c, step, row);
      delta.value[m][group] = static_cast<const Compute*>(
          c.params.delta)[workspace_row(c.params.shape, c.seq, step.head, row)];
    }
    x = x == -infinity<Compute>() ? infinity<Compute>() : Logits<Config>::from_natural(x);
  });
}

// P_ij = exp(scale Q_i K_j^T - lse) and dS_ij = P_ij * (dO_i V_j^T - delta), to shared memory
// (lines 11 to 20 without the products that follow).
template <class Config>
__device__ inline void score_tiles(const BackwardContext<Config>& c, const QStep& step,
                                   int kv_begin) {
  using Types = BackwardTypes<Config>;
  using Compute = typename Config::Compute;
  using Scores = typename Types::Scores;
  const typename Types::ScoreGrid warp;
  if (!warp.active) return;
  const int row0 = warp.row * Scores::rows;
  const int key0 = warp.column * Scores::columns;
  WorkItem item = c.item;
  item.head = step.head;
  typename Types::Rows lse, delta;
  load_statistics<Config>(c, step, row0, lse, delta);

  Scores p;
  p.fill(0);
  Products<Config>::template multiply<Config::head_dim>(p, rows_by_depth(c.q(step.stage), row0),
                                                        rows_by_depth(c.k(), key0));
  prepare_scores<Config>(p, item, c.seq, step.q_begin + row0, kv_begin + key0, step.edge);
  const Compute factor = Logits<Config>::factor(c.params.scale);
  p.for_each([&](Compute& s, int m, int, int group, int) {
    s = Logits<Config>::exponential(s, factor, lse.value[m][group]);
  });
  store_shared(p, c.p(), row0, key0);

  Scores ds;
  ds.fill(0);
  Products<Config>::template multiply<Config::head_dim_v>(
      ds, rows_by_depth(c.dout(step.stage), row0), rows_by_depth(c.v(), key0));
  differentiate_scores<Config>(ds, p, delta, item, step.q_begin + row0, kv_begin + key0);
  store_shared(ds, c.ds(), row0, key0);
}

// dV_j += P_ij^T dO_i and dK_j += dS_ij^T Q_i (lines 16 and 22).
template <class Config, class KGradient, class VGradient>
__device__ inline void accumulate_kv(const BackwardContext<Config>& c, const QStep& step,
                                     KGradient& dk, VGradient& dv) {
  const typename BackwardTypes<Config>::KvGrid warp;
  if (!warp.active) return;
  const int key0 = warp.row * KGradient::rows;
  Products<Config>::template multiply<Config::block_q>(
      dv, depth_by_rows(c.p(), key0),
      depth_by_rows(c.dout(step.stage), warp.column * VGradient::columns));
  Products<Config>::template multiply<Config::block_q>(
      dk, depth_by_rows(c.ds(), key0),
      depth_by_rows(c.q(step.stage), warp.column * KGradient::columns));
}

// dQ_i += dS_ij K_j (line 21): read from the workspace unless this is the first K/V tile, written
// back to it, or, on the last K/V tile that the q tile sees, to `dq`.
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

// A finished dK_j or dV_j (line 24); `tensor` and `columns` say which.
template <class Config, class Gradient>
__device__ inline void store_kv(const BackwardContext<Config>& c, const Tensor& tensor, int columns,
                                int kv_begin, double factor, const Gradient& gradient) {
  const typename BackwardTypes<Config>::KvGrid warp;
  if (!warp.active) return;
  const int row = kv_begin + warp.row * Gradient::rows;
  store_rounded<Config::copies != CopyKind::element>(
      gradient, kv_row<typename Config::Storage>(tensor, c.seq, c.item.head, row),
      tensor.row_stride, c.seq.seqlen_kv - row, warp.column * Gradient::columns, columns,
      static_cast<typename Config::Compute>(factor));
}

// The gradient of the queries of a tile that sees no key.
template <class Config>
__device__ inline void store_dead_tile(const BackwardContext<Config>& c, int head, int q_tile) {
  const int begin = q_tile * Config::block_q;
  store_zeros<Config::copies != CopyKind::element, BackwardTypes<Config>::threads,
              Config::head_dim>(
      q_row<typename Config::Storage>(c.params.dq, c.seq, head, begin), c.params.dq.row_stride,
      min(Config::block_q, c.seq.seqlen_q - begin), c.params.shape.head_dim);
}

}  // namespace cuflash::fa1
