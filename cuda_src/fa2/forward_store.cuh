// FlashAttention-2 forward: the end of a q tile.
#pragma once

#include "forward_paired.cuh"

namespace cuflash::fa2 {

// Divides by the rows' sums and writes the log-sum-exp.
template <class Config>
__device__ inline void finish_rows(const ForwardContext<Config>& c, ForwardState<Config>& state) {
  using Compute = typename Config::Compute;
  using Output = typename ForwardTypes<Config>::Output;
  using Chunks = typename Config::Chunks;
  const LanePosition lane;
  const int first_row = c.first_query() + lane.row;
  typename ForwardTypes<Config>::Rows inverse;  // zero for a row that has seen nothing
  typename ForwardTypes<Config>::Rows keep;     // factor of the output
  if constexpr (Config::paired) add_up_sums(c, state.sum);
  state.sum.for_each([&](Compute& sum, int m, int group) {
    const int row = first_row + Output::row(m, group);
    Compute& reference = state.reference.value[m][group];
    if constexpr (!Config::paired) {
      sum = combine_row_lanes(sum, [](Compute a, Compute b) { return a + b; });
    }
    keep.value[m][group] = end_row<Config>(c.params, c.item.head, reference, sum);
    inverse.value[m][group] = inverse_of(sum, keep.value[m][group]);
    if (lane.column != 0 || c.part() != 0) return;
    if (row >= c.seq.rows_q || !Chunks::keeps_rows(c.params)) return;
    Chunks::template keep_row<Config>(c.params, c.seq, c.item, row, reference, sum);
  });
  state.output.for_each([&](Compute& x, int m, int, int group, int) {
    x = Logits<Config>::normalise(x, state.sum.value[m][group], keep.value[m][group],
                                  inverse.value[m][group]);
    if (is_surplus<Config>(c.seq, first_row + Output::row(m, group))) x = 0;
  });
}

// Synchronises with the warps or lanes that wrote what this warp stores.
template <class Config>
__device__ inline void meet_sharers() {
  if constexpr (Config::paired) {
    meet_in_pair();
  } else {
    __syncwarp();
  }
}

// Writes output and log-sum-exp.
template <class Config>
__device__ inline void store_rows(const ForwardContext<Config>& c, ForwardState<Config>& state) {
  using Compute = typename Config::Compute;
  using Types = ForwardTypes<Config>;
  using Output = typename Types::Output;
  using T = typename Config::Output;
  finish_rows(c, state);
  const auto& tensor = Config::Chunks::template out<Config>(c.params, c.item.split);
  const int valid_columns = c.params.shape.head_dim_v;
  const auto column0 = [&] {
    if constexpr (Config::paired) {
      return part_offset<typename Types::OutTile, Output::columns>(c.part());
    } else {
      return Zero{};
    }
  }();
  if constexpr (Types::staged) {
    // The output overwrites Q. If the output is narrower, it also overwrites other warps' rows of
    // Q. This is safe because every warp has read Q before the barrier of the last step.
    constexpr int rows = Output::rows / Types::sharing;  // rows that this warp writes
    const int first = c.part() * rows;
    T* out = q_row<T>(tensor, c.seq, c.item.head, c.first_query() + first);
    __syncwarp();
    store_shared<Config::architecture>(state.output, c.staging(), c.row0, column0);
    meet_sharers<Config>();
    copy_out(c.staging(), c.row0 + first, rows, out, tensor.row_stride,
             c.seq.rows_q - c.first_query() - first, valid_columns);
  } else {
    T* out = q_row<T>(tensor, c.seq, c.item.head, c.first_query());
    store_rounded<Config::copies != CopyKind::element>(state.output, out, tensor.row_stride,
                                                       c.seq.rows_q - c.first_query(), column0,
                                                       valid_columns, Compute(1));
  }
}

}  // namespace cuflash::fa2
