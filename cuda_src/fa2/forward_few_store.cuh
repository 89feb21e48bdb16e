// FlashAttention-2 forward for few queries: the warps' results become one, which is stored.
#pragma once

#include "forward_few_products.cuh"

namespace cuflash::fa2 {

// Four neighbouring numbers of a row.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

// Puts the rows of this warp in shared memory. Every lane of the warp has read its stages.
template <class Config>
__device__ inline void post_rows(const FewContext<Config>& c, FewState<Config>& state) {
  using Types = FewTypes<Config>;
  const int lane = ptx::opaque_lane(), warp = c.warp();
  const LanePosition position;
  state.sum.for_each([&](float& sum, int, int group) {
    sum = combine_row_lanes(sum, [](float a, float b) { return a + b; });
    if (position.column != 0) return;
    c.shared.ends.data[warp * Types::rows + position.row + 8 * group] = {
        state.reference.value[0][group], sum};
  });
  const int rows = c.seq.rows_q - c.first_query();
  float* const result = c.shared.rings[warp].result();
  state.output.for_each([&](float& x, int, int n, int group, int which) {
    const int row = position.row + 8 * group;
    const int column = FewProducts<Config>::column(n, which, lane % 4);
    if (row < rows) result[row * Types::out_stride + column] = x;
  });
}

// A row's reference and sum over all warps, and the factor of each warp's results.
template <class Config>
struct MergedEnds {
  float reference = -infinity<float>();
  float sum = 0;
  float factor[Config::warps];

  __device__ MergedEnds(const Pair<float>* ends) {  // of the row in warp 0
    constexpr int rows = FewTypes<Config>::rows;
#pragma unroll
    for (int warp = 0; warp < Config::warps; ++warp) {
      reference = larger(reference, ends[warp * rows].x);
    }
    const float offset = subtrahend(reference);
#pragma unroll
    for (int warp = 0; warp < Config::warps; ++warp) {
      factor[warp] = Logits<Config>::exponential(ends[warp * rows].x - offset);
      sum = fma(factor[warp], ends[warp * rows].y, sum);
    }
  }
};

// Merges four neighbouring columns of a row at a time.
template <class Config>
__device__ inline void store_few(const FewContext<Config>& c) {
  using T = typename Config::Output;
  using Types = FewTypes<Config>;
  using Chunks = typename Config::Chunks;
  constexpr int fours = Config::head_dim_v / 4;
  const int begin = c.first_query();
  const int rows = min(Types::rows, c.seq.rows_q - begin);
  const auto& tensor = Chunks::template out<Config>(c.params, c.item.split);
  for (int i = threadIdx.x; i < rows * fours; i += 32 * Config::warps) {
    const int row = i / fours, column = i % fours * 4;
    const Pair<float>* const of_row = c.shared.ends.data + row;
    MergedEnds<Config> ends(of_row);
    const float keep = end_row<Config>(c.params, c.item.head, ends.reference, ends.sum);
    float inverse = inverse_of(ends.sum, keep);
    if (is_surplus<Config>(c.seq, begin + row)) inverse = 0;
    if (column == 0 && Chunks::keeps_rows(c.params)) {
      Chunks::template keep_row<Config>(c.params, c.seq, c.item, begin + row, ends.reference,
                                        ends.sum);
    }
    if (column >= c.params.shape.head_dim_v) continue;
    if constexpr (Config::Stored::converts) {
      const float scale = Config::Stored::scale_of_values(c.params, c.item.entry, c.kv_head);
      if (inverse != 0.0f) inverse *= scale;
    }
    float merged[4] = {};
#pragma unroll
    for (int warp = 0; warp < Config::warps; ++warp) {
      if (of_row[warp * Types::rows].x == -infinity<float>()) continue;  // it has seen no key
      const auto* const result = c.shared.rings[warp].result() + row * Types::out_stride + column;
      const auto four = *reinterpret_cast<const Four<float>*>(result);
#pragma unroll
      for (int n = 0; n < 4; ++n) merged[n] = fma(ends.factor[warp], four.value[n], merged[n]);
    }
    Four<T> out;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      out.value[n] = from_compute<T>(Logits<Config>::normalise(merged[n], 0, 0, inverse));
    }
    *reinterpret_cast<Four<T>*>(q_row<T>(tensor, c.seq, c.item.head, begin + row) + column) = out;
  }
}

}  // namespace cuflash::fa2
