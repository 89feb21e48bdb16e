// FlashAttention-1 forward: the parts of one step of Algorithm 1, in the order they happen.
#pragma once

#include "forward_types.cuh"

namespace cuflash::fa1 {

// Copies K_j and V_j to shared memory (line 6).
template <class Config>
__device__ inline void load_kv_tile(const ForwardContext<Config>& c, int kv_begin) {
  using Types = ForwardTypes<Config>;
  using Storage = typename Config::Storage;
  const int rows = c.seq.seqlen_kv - kv_begin;
  copy_tile<Config::copies, Types::threads>(
      c.k(), kv_row<const Storage>(c.params.k, c.seq, c.kv_head, kv_begin), c.params.k.row_stride,
      rows, c.params.shape.head_dim);
  copy_tile<Config::copies, Types::threads>(
      c.v(), kv_row<const Storage>(c.params.v, c.seq, c.kv_head, kv_begin), c.params.v.row_stride,
      rows, c.params.shape.head_dim_v);
}

// Copies this group's rows of Q_i to shared memory (line 8), as one group of copies.
template <class Config>
__device__ inline void load_q_tile(const ForwardContext<Config>& c, int q_tile) {
  const int query = c.first_query(q_tile);
  copy_tile<Config::copies, ForwardTypes<Config>::row_threads>(
      c.q(), q_row<const typename Config::Storage>(c.params.q, c.seq, c.item.head, query),
      c.params.q.row_stride, c.seq.seqlen_q - query, c.params.shape.head_dim, c.warp.row_thread());
  commit_copies<Config::copies>();
}

// Copies this group's rows of O_i from the workspace to shared memory (line 8), as one group of
// copies.
template <class Config>
__device__ inline void load_o_tile(const ForwardContext<Config>& c, int q_tile) {
  const int query = c.first_query(q_tile);
  copy_tile<Config::workspace_copies, ForwardTypes<Config>::row_threads>(
      c.o(), c.out_accumulator(query), Config::head_dim_v, c.seq.seqlen_q - query,
      Config::head_dim_v, c.warp.row_thread());
  commit_copies<Config::workspace_copies>();
}

// Waits for O_i, but not for a next Q tile whose copy started after it.
template <class Config>
__device__ inline void wait_o_tile(bool q_tile_under_way) {
  if (Config::copies == CopyKind::asynchronous && q_tile_under_way) {
    wait_copies<Config::workspace_copies, 1>();
  } else {
    wait_copies<Config::workspace_copies, 0>();
  }
}

// Loads m_i and l_i from the workspace (line 8), or the values with which a row starts.
template <class Config, class Rows>
__device__ inline void load_statistics(const ForwardContext<Config>& c, int q_tile, bool first,
                                       Rows& row_max, Rows& row_sum) {
  using Scores = typename ForwardTypes<Config>::Scores;
  const LanePosition lane;
  const int first_row = c.first_query(q_tile) + lane.row;
  row_max.for_each([&](typename Config::Compute& reference, int m, int group) {
    const int row = first_row + Scores::row(m, group);
    begin_row(reference, row_sum.value[m][group]);
    if (!first && row < c.seq.seqlen_q) {
      reference = c.row_max(row);
      row_sum.value[m][group] = c.row_sum(row);
    }
  });
}

// S_ij = Q_i K_j^T, masked (line 9).
template <class Config, class Scores>
__device__ inline void score_tile(const ForwardContext<Config>& c, Scores& scores, int q_tile,
                                  int kv_begin, bool edge) {
  scores.fill(0);
  Products<Config>::template multiply<Config::head_dim>(scores, rows_by_depth(c.q(), 0),
                                                        rows_by_depth(c.k(), c.key0()));
  prepare_scores<Config>(c.params, scores, c.seq, c.item.head, c.first_query(q_tile),
                         kv_begin + c.key0(), edge);
}

// Where the warps divide the keys: publishes this warp's number for each row of the group.
template <class Config, class Rows>
__device__ inline void publish_rows(const ForwardContext<Config>& c,
                                    typename Config::Compute* shared, Rows& rows) {
  if constexpr (ForwardTypes<Config>::keys_parted) {
    const LanePosition lane;
    if (lane.column != 0) return;
    typename Config::Compute* to =
        shared + c.warp.column * ForwardTypes<Config>::rows_per_warp + lane.row;
    rows.for_each([&](typename Config::Compute& x, int m, int group) {
      to[ForwardTypes<Config>::Scores::row(m, group)] = x;
    });
  }
}

// Where the warps divide the keys, after a barrier: combines the numbers that the group's warps
// published.
template <class Config, class Rows, class Function>
__device__ inline void gather_rows(const ForwardContext<Config>& c,
                                   const typename Config::Compute* shared, Rows& rows,
                                   Function function) {
  if constexpr (ForwardTypes<Config>::keys_parted) {
    const LanePosition lane;
    constexpr int stride = ForwardTypes<Config>::rows_per_warp;
    const typename Config::Compute* from = shared + lane.row;
    rows.for_each([&](typename Config::Compute& x, int m, int group) {
      const int row = ForwardTypes<Config>::Scores::row(m, group);
      x = from[row];
#pragma unroll
      for (int w = 1; w < Config::warps_kv; ++w) x = function(x, from[w * stride + row]);
    });
  }
}

// Where the warps divide the keys: each warp finishes the columns it owns and passes on the others.
template <class Config>
__device__ inline bool owns_fragment(const ForwardContext<Config>& c, int n) {
  return !ForwardTypes<Config>::keys_parted || n % Config::warps_kv == c.warp.column;
}

template <class Config, class Output>
__device__ inline void publish_output(const ForwardContext<Config>& c, const Output& output) {
  if constexpr (ForwardTypes<Config>::keys_parted) {
    using Compute = typename Config::Compute;
    const LanePosition lane;
    const auto partial = c.partial(c.warp.column);
    Output::for_each_pair([&](int m, int n, int group) {
      if (owns_fragment<Config>(c, n)) return;
      *reinterpret_cast<Pair<Compute>*>(
          &partial.at(lane.row + Output::row(m, group), lane.column + Output::column(n))) = {
          output.value[m][n][group][0], output.value[m][n][group][1]};
    });
  }
}

// Adds the other warps' sums to the owned columns of P V.
template <class Config, class Output>
__device__ inline void gather_output(const ForwardContext<Config>& c, Output& output) {
  if constexpr (ForwardTypes<Config>::keys_parted) {
    using Compute = typename Config::Compute;
    const LanePosition lane;
#pragma unroll
    for (int w = 1; w < Config::warps_kv; ++w) {
      const auto partial = c.partial((c.warp.column + w) % Config::warps_kv);
      Output::for_each_pair([&](int m, int n, int group) {
        if (!owns_fragment<Config>(c, n)) return;
        const Pair<Compute> other = *reinterpret_cast<const Pair<Compute>*>(
            &partial.at(lane.row + Output::row(m, group), lane.column + Output::column(n)));
        output.value[m][n][group][0] += other.x;
        output.value[m][n][group][1] += other.y;
      });
    }
  }
}

template <class Config>
__device__ inline void store_lse(const ForwardContext<Config>& c, int row,
                                 typename Config::Compute lse) {
  if (c.params.lse.data == nullptr) return;
  *row_number<typename Config::Statistics>(c.params.lse, c.seq, c.item.head, row) = lse;
}

// Adds this tile's part to l_i and m_i (line 11) and writes them to the workspace, or, on the last
// step, writes the log-sum-exp to its destination. `keep` becomes the weight of the old O, `sum`
// the new l_i; `kept` is the output's factor at the end of a row, and 1 before the last step.
template <class Config, class Rows>
__device__ inline void update_statistics(const ForwardContext<Config>& c, const Rows& old_max,
                                         const Rows& old_sum, Rows& new_max, Rows& sum, Rows& keep,
                                         Rows& kept, int q_tile, bool last) {
  using Compute = typename Config::Compute;
  const LanePosition lane;
  const int first_row = c.first_query(q_tile) + lane.row;
  const bool writes = c.warp.column == 0 && lane.column == 0;
  new_max.for_each([&](Compute& reference, int m, int group) {
    const int row = first_row + ForwardTypes<Config>::Scores::row(m, group);
    keep.value[m][group] =
        old_sum.value[m][group] *
        Logits<Config>::exponential(old_max.value[m][group] - subtrahend(reference));
    Compute& total = sum.value[m][group];
    total += keep.value[m][group];
    kept.value[m][group] = 1;
    if (last) kept.value[m][group] = end_row<Config>(c.params, c.item.head, reference, total);
    if (!writes || row >= c.seq.rows_q) return;
    if (last) {
      store_lse<Config>(c, row, lse_of_row<Config>(c.seq, row, reference, total));
    } else {
      c.row_max(row) = reference;
      c.row_sum(row) = total;
    }
  });
}

// O_i <- (keep * O_i + P V) / l_i in the owned columns (line 12). Writes it to the workspace, or,
// at the last kv tile that the q tile sees, to `out`.
template <class Config, class Output, class Rows>
__device__ inline void update_output(const ForwardContext<Config>& c, const Output& output,
                                     const Rows& keep, Rows& sum, const Rows& kept, int q_tile,
                                     bool first, bool last) {
  using Compute = typename Config::Compute;
  using T = typename Config::Output;
  const LanePosition lane;
  const int query = c.first_query(q_tile) + lane.row;
  const int valid_rows = c.seq.rows_q - query;
  T* out = q_row<T>(c.params.out, c.seq, c.item.head, query);
  Compute* accumulator = c.out_accumulator(query) + lane.column;
  Rows inverse;  // zero for a row that has seen nothing
  sum.for_each([&](Compute& x, int m, int group) {
    inverse.value[m][group] = inverse_of(x, kept.value[m][group]);
  });
  Output::for_each_pair([&](int m, int n, int group) {
    if (!owns_fragment<Config>(c, n)) return;
    Compute x = output.value[m][n][group][0];
    Compute y = output.value[m][n][group][1];
    if (!first) {
      const Pair<Compute> before = *reinterpret_cast<const Pair<Compute>*>(
          &c.o().at(lane.row + Output::row(m, group), lane.column + Output::column(n)));
      x = fma(before.x, keep.value[m][group], x);
      y = fma(before.y, keep.value[m][group], y);
    }
    const Compute factor = kept.value[m][group];
    x = Logits<Config>::normalise(x, sum.value[m][group], factor, inverse.value[m][group]);
    y = Logits<Config>::normalise(y, sum.value[m][group], factor, inverse.value[m][group]);
    if (Output::row(m, group) >= valid_rows) return;
    if (is_surplus<Config>(c.seq, query + Output::row(m, group))) x = y = 0;
    if (last) {
      const int column = lane.column + Output::column(n);
      store_pair<Config::copies != CopyKind::element>(
          out + Output::row(m, group) * c.params.out.row_stride + column, column,
          c.params.shape.head_dim_v, x, y);
    } else {
      *reinterpret_cast<Pair<Compute>*>(accumulator + Output::row(m, group) * Config::head_dim_v +
                                        Output::column(n)) = {x, y};
    }
  });
}

// Stores the rows of a tile that sees no key: output 0, and the log-sum-exp of a row that has
// summed nothing.
template <class Config>
__device__ inline void store_dead_tile(const ForwardContext<Config>& c, int q_tile) {
  using Compute = typename Config::Compute;
  constexpr int threads = ForwardTypes<Config>::threads;
  const int begin = q_tile * Config::block_q;
  const int rows = min(Config::block_q, c.seq.rows_q - begin);
  store_zeros<Config::copies != CopyKind::element, threads, Config::head_dim_v>(
      q_row<typename Config::Output>(c.params.out, c.seq, c.item.head, begin),
      c.params.out.row_stride, rows, c.params.shape.head_dim_v);
  Compute reference, sum;
  begin_row(reference, sum);
  end_row<Config>(c.params, c.item.head, reference, sum);
  for (int i = threadIdx.x; i < rows; i += threads) {
    store_lse<Config>(c, begin + i, lse_of_row<Config>(c.seq, begin + i, reference, sum));
  }
}

}  // namespace cuflash::fa1
