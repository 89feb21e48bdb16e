// FlashAttention-3 forward: finishes and stores a tile.
#pragma once

#include "forward_softmax.cuh"

namespace cuflash::fa3 {

// Sums the rows' weights over the lanes, stores the log-sum-exp, and returns the factor of each
// row's output. Runs beside the last product of the tile.
template <class Config, class Rows = typename ForwardTypes<Config>::Rows>
__device__ __forceinline__ Rows end_rows(const ForwardContext<Config>& c,
                                         const ForwardTile<Config>& tile, RowState<Config>& rows,
                                         int row0) {
  using Chunks = typename Config::Chunks;
  const LanePosition lane;
  Rows inverse;  // zero for a row that has seen nothing
  rows.sum.for_each([&](float& sum, int m, int group) {
    const int row = row0 + lane.row + 8 * group;
    float reference = rows.seen[group] ? rows.reference.value[m][group] : -infinity<float>();
    sum = combine_row_lanes(sum, [](float a, float b) { return a + b; });
    const float keep = end_row<Config>(c.params, tile.item.head, reference, sum);
    inverse.value[m][group] = inverse_of(sum, keep);
    if (is_surplus<Config>(tile.seq, row)) inverse.value[m][group] = 0;
    if constexpr (Config::Stored::converts) {
      const float scale = Config::Stored::scale_of_values(c.params, tile.item.entry, tile.kv_head);
      if (inverse.value[m][group] != 0) inverse.value[m][group] *= scale;
    }
    if (lane.column != 0 || row >= tile.seq.rows_q || !Chunks::keeps_rows(c.params)) return;
    Chunks::template keep_row<Config>(c.params, tile.seq, tile.item, row, reference, sum);
  });
  return inverse;
}

// Multiplies by the factors of end_rows() and stores the warp's rows, which begin at row0.
//
// No warp may return early, not even one without rows: the compiler could then not assume that
// the four warps stay together, and would emit slower code for every step.
template <class Config, class Output, class Rows>
__device__ __forceinline__ void store_rows(const ForwardContext<Config>& c,
                                           const ForwardTile<Config>& tile, Output& output,
                                           const Rows& inverse, int row0) {
  using T = typename Config::Output;
  output.for_each([&](float& x, int m, int, int group, int) { x *= inverse.value[m][group]; });
  const bool dead = inverse.value[0][0] == 0.0f || inverse.value[0][1] == 0.0f;
  if (__any_sync(0xffffffffu, dead)) {  // zero weights times values that are not finite are NaN
    output.for_each([&](float& x, int m, int, int group, int) {
      if (inverse.value[m][group] == 0.0f) x = 0.0f;
    });
  }
  if constexpr (Config::Chunks::split) {
    const Tensor parts = Config::Chunks::template out<Config>(c.params, tile.item.split);
    T* const out = q_row<T>(parts, tile.seq, tile.item.head, row0);
    store_rounded<true>(output, out, parts.row_stride, tile.seq.rows_q - row0, 0,
                        c.params.shape.head_dim_v, 1.0f);
    return;
  }
  T* const out = q_row<T>(c.params.out, tile.seq, tile.item.head, row0);
  const int valid_rows = tile.seq.rows_q - row0;
  const int valid_columns = c.params.shape.head_dim_v;
  if constexpr (sizeof(T) == 2) {
    store_staged(output, c.shared.out[threadIdx.x / 32 - 4], out, c.params.out.row_stride,
                 valid_rows, valid_columns);
  } else {
    store_rounded<true>(output, out, c.params.out.row_stride, valid_rows, 0, valid_columns, 1.0f);
  }
}

}  // namespace cuflash::fa3
