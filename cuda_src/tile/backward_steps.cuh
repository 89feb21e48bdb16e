// Backward passes: the parts of one step, which pairs a q tile of one head with the block's kv
// tile. `c` is the kernel's context: parameters, sequence, `item.head` (the kv head) and its tiles
// in shared memory.
#pragma once

#include "backward_tiles.cuh"

namespace cuflash {

// K_j and V_j -> shared memory.
template <class Config, class Context>
__device__ inline void load_kv_tile(const Context& c, int kv_begin) {
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

// Writes P_ij = exp(scale Q_i K_j^T - lse), after dropout, to `p` in shared memory, and dS_ij =
// P_ij * (dO_i V_j^T - delta) to `ds`. `statistics` gives lse and delta of this warp's rows; an
// infinite lse makes a row's P zero. When S and dP are computed in turn, lse and delta are each
// read after their product, because the product needs the registers.
template <class Config, class Context, class Shared, class Statistics>
__device__ inline void score_tiles(const Context& c, const QStep& step, int kv_begin,
                                   const Shared& p_tile, const Shared& ds_tile,
                                   Statistics statistics) {
  using Types = BackwardTypes<Config>;
  using Compute = typename Config::Compute;
  using Scores = typename Types::Scores;
  const typename Types::ScoreGrid warp;
  if (!warp.active) return;
  const int row0 = warp.row * Scores::rows;
  const int key0 = warp.column * Scores::columns;
  typename Types::Rows lse, delta;
  Scores p, ds;
  p.fill(0);
  ds.fill(0);
  const auto q = rows_by_depth(c.q(step.stage), row0);
  const auto k = rows_by_depth(c.k(), key0);
  const auto dout = rows_by_depth(c.dout(step.stage), row0);
  const auto v = rows_by_depth(c.v(), key0);
  if constexpr (Types::together) {
    lse = statistics.lse_of(row0);
    delta = statistics.delta_of(row0);
    Products<Config>::template multiply_two_ahead<Config::head_dim>(p, q, k, ds, dout, v);
  } else {
    Products<Config>::template multiply_ahead<Config::head_dim>(p, q, k);
    lse = statistics.lse_of(row0);
  }
  SlopesOf<Config, Scores> slopes;
  prepare_scores<Config>(c.params, p, c.seq, step.head, step.q_begin + row0, kv_begin + key0,
                         step.edge, slopes);
  const Compute factor = logit_factor<Config>(c.params);
  exponentials<Config>(p, factor, [&](int m, int, int group, int) { return lse.value[m][group]; });
  if constexpr (Config::Score::summed && Config::Lengths::vary) {
    // A row beyond the length may have NaN scores. Shared memory is cleared of such rows only
    // later, but the sum over pairs is formed here.
    p.for_each([&](Compute& x, int m, int, int group, int) {
      if (lse.value[m][group] == infinity<Compute>()) x = Compute(0);
    });
  }
  const RowsOfQueries place{c.seq.entry, step.head, step.q_begin + row0, kv_begin + key0};
  const KeptPairs<Config, Scores> kept(c.params, place);
  store_shared<Config::architecture>(kept.of_weights(p), p_tile, row0,
                                     part_offset<Shared, Scores::columns>(warp.column));
  if constexpr (!Config::Score::summed) slopes.multiply(p);

  if constexpr (!Types::together) {
    Products<Config>::template multiply_ahead<Config::head_dim_v>(ds, dout, v);
    delta = statistics.delta_of(row0);
  }
  kept.scale_gradients(c.params, ds);
  differentiate_scores(ds, p, delta);
  if constexpr (Config::Score::summed) {
    sum_pairs<Config>(c.params, place, kv_begin, p, ds);
    slopes.multiply(ds);
  }
  store_shared<Config::architecture>(ds, ds_tile, row0,
                                     part_offset<Shared, Scores::columns>(warp.column));
}

// dV_j += P_ij^T dO_i.
template <class Config, class Context, class Shared, class VGradient>
__device__ inline void accumulate_v(const Context& c, const QStep& step, const Shared& p_tile,
                                    VGradient& dv) {
  const typename BackwardTypes<Config>::KvGrid warp;
  if (!warp.active) return;
  using Tile = typename BackwardTypes<Config>::DoutTile;
  Products<Config>::template multiply_ahead<Config::block_q>(
      dv, depth_by_rows(p_tile, part_offset<Shared, VGradient::rows>(warp.row)),
      depth_by_rows(c.dout(step.stage), part_offset<Tile, VGradient::columns>(warp.column)));
}

// dK_j += dS_ij^T Q_i.
template <class Config, class Context, class Shared, class KGradient>
__device__ inline void accumulate_k(const Context& c, const QStep& step, const Shared& ds_tile,
                                    KGradient& dk) {
  const typename BackwardTypes<Config>::KvGrid warp;
  if (!warp.active) return;
  using Tile = typename BackwardTypes<Config>::QTile;
  Products<Config>::template multiply_ahead<Config::block_q>(
      dk, depth_by_rows(ds_tile, part_offset<Shared, KGradient::rows>(warp.row)),
      depth_by_rows(c.q(step.stage), part_offset<Tile, KGradient::columns>(warp.column)));
}

// Stores a finished dK_j or dV_j; `tensor` and `columns` say which.
template <class Config, class Context, class Gradient>
__device__ inline void store_kv(const Context& c, const Tensor& tensor, int columns, int kv_begin,
                                double factor, const Gradient& gradient) {
  const typename BackwardTypes<Config>::KvGrid warp;
  if (!warp.active) return;
  const int row = kv_begin + warp.row * Gradient::rows;
  store_rounded<Config::copies != CopyKind::element>(
      gradient, kv_row<typename Config::Storage>(tensor, c.seq, c.item.head, row),
      tensor.row_stride, c.seq.rows_kv - row, warp.column * Gradient::columns, columns,
      static_cast<typename Config::Compute>(factor));
}

}  // namespace cuflash
