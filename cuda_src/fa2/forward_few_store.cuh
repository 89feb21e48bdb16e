// FlashAttention-2 forward for few queries: merges the results of the warps and stores them.
#pragma once

#include "../tile/running_ends.cuh"
#include "forward_few_products.cuh"

namespace cuflash::fa2 {

// Four neighbouring numbers of a row.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

// Puts the rows of this warp in shared memory, which may overwrite its ring: every lane of the warp
// has read its slots.
template <class Config>
__device__ inline void post_rows(const FewContext<Config>& c, FewState<Config>& state) {
  using Types = FewTypes<Config>;
  const int lane = ptx::opaque_lane(), warp = c.warp();
  const LanePosition position;
  state.sum.for_each([&](float& sum, int m, int group) {
    sum = combine_row_lanes(sum, [](float a, float b) { return a + b; });
    if (position.column != 0) return;
    const int row = position.row + Types::Output::row(m, group);
    c.shared.ends.data[warp * Types::rows + row] = {state.reference.value[m][group], sum};
  });
  const int rows = c.rows.count;
  float* const result = c.shared.of(warp);
  state.output.for_each([&](float& x, int m, int n, int group, int which) {
    const int row = position.row + Types::Output::row(m, group);
    const int column = FewProducts<Config>::column(n, which, lane % 4);
    if (row < rows) result[row * Types::out_stride + column] = x;
  });
}

// Four columns of a row of the current chunk: merges the results of the warps.
template <class Config>
struct ChunkRow {
  using Types = FewTypes<Config>;
  float reference = -infinity<float>();
  float sum = 0;
  float output[4] = {};  // of columns [column, column + 4)

  __device__ ChunkRow(const FewContext<Config>& c, int row, int column) {
    const Pair<float>* const ends = c.shared.ends.data + row;  // of warp 0
#pragma unroll
    for (int warp = 0; warp < Config::warps; ++warp) {
      reference = larger(reference, ends[warp * Types::rows].x);
    }
    const float offset = subtrahend(reference);
#pragma unroll
    for (int warp = 0; warp < Config::warps; ++warp) {
      const Pair<float> end = ends[warp * Types::rows];
      if (end.y == 0.0f) continue;  // the row has seen no key; its sum is NaN if it has seen NaN
      const float weight = Logits<Config>::exponential(end.x - offset);
      sum = fma(weight, end.y, sum);
      const auto* const result = c.shared.of(warp) + row * Types::out_stride + column;
      const auto four = *reinterpret_cast<const Four<float>*>(result);
#pragma unroll
      for (int n = 0; n < 4; ++n) output[n] = fma(weight, four.value[n], output[n]);
    }
    if (is_surplus<Config>(c.seq, c.rows.query(row))) reference = -infinity<float>(), sum = 0;
  }

  // Divides the output by the sum, and multiplies it by the factors of the row and of the values.
  __device__ void normalise(const FewContext<Config>& c, float keep) {
    float inverse = inverse_of(sum, keep);
    if constexpr (Config::Stored::converts) {
      const float scale = Config::Stored::scale_of_values(c.params, c.item.entry, c.kv_head);
      if (inverse != 0.0f) inverse *= scale;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) output[n] = Logits<Config>::normalise(output[n], 0, 0, inverse);
  }
};

// Calls function(row, column) for each four columns of the block's rows, in one thread each.
template <class Config, class Function>
__device__ inline void for_each_four(const FewContext<Config>& c, Function function) {
  constexpr int fours = Config::head_dim_v / 4;
  const int count = min(Config::result_rows, c.rows.count) * fours;
  for (int i = threadIdx.x; i < count; i += 32 * Config::warps) {
    function(i / fours, i % fours * 4);
  }
}

template <class Config>
__device__ inline void store_four(const FewContext<Config>& c, int row, int column,
                                  const float (&x)[4]) {
  using T = typename Config::Output;
  if (column >= c.params.shape.head_dim_v) return;
  const auto& tensor = Config::Chunks::template out<Config>(c.params, c.item.split);
  Four<T> out;
#pragma unroll
  for (int n = 0; n < 4; ++n) out.value[n] = from_compute<T>(x[n]);
  auto* const to = q_row<T>(tensor, c.seq, c.rows.head(row), c.rows.query(row)) + column;
  *reinterpret_cast<Four<T>*>(to) = out;
}

// Stores the end of a row, where the kernel does so.
template <class Config>
__device__ inline void store_ends(const FewContext<Config>& c, int row, float reference,
                                  float sum) {
  if (!Config::Chunks::keeps_rows(c.params)) return;
  WorkItem item = c.item;
  item.head = c.rows.head(row);
  Config::Chunks::template keep_row<Config>(c.params, c.seq, item, c.rows.query(row), reference,
                                            sum);
}

// Stores the rows of the only chunk.
template <class Config>
__device__ inline void store_chunk(const FewContext<Config>& c) {
  for_each_four(c, [&](int row, int column) {
    ChunkRow<Config> chunk(c, row, column);
    const float keep = end_row<Config>(c.params, c.rows.head(row), chunk.reference, chunk.sum);
    chunk.normalise(c, keep);
    store_four(c, row, column, chunk.output);
    if (column == 0) store_ends(c, row, chunk.reference, chunk.sum);
  });
}

// Adds the rows of a chunk to those of the chunks before it.
template <class Config>
__device__ inline void merge_chunk(const FewContext<Config>& c, int number) {
  for_each_four(c, [&](int row, int column) {
    ChunkRow<Config> chunk(c, row, column);
    chunk.sum = checked_sum(chunk.reference, chunk.sum);
    chunk.normalise(c, 1.0f);
    Pair<float> before = {-infinity<float>(), 0};
    Four<float> merged = {};
    auto& kept =
        *reinterpret_cast<Four<float>*>(c.shared.merged.data + row * Config::head_dim_v + column);
    if (number > 0) before = c.shared.ends_of_merged[(number + 1) % 2].data[row], merged = kept;
    const float reference = larger(before.x, chunk.reference);
    const auto factors = chunk_factors<Config>(before.x, reference, chunk.reference, chunk.sum);
#pragma unroll
    for (int n = 0; n < 4; ++n) merged.value[n] = factors.merged(merged.value[n], chunk.output[n]);
    kept = merged;
    if (column == 0) {
      c.shared.ends_of_merged[number % 2].data[row] = {reference, factors.summed(before.y)};
    }
  });
}

// Stores the rows of `count` chunks.
template <class Config>
__device__ inline void store_merged(const FewContext<Config>& c, int count) {
  for_each_four(c, [&](int row, int column) {
    Pair<float> ends = {-infinity<float>(), 0};
    Four<float> merged = {};
    if (count > 0) {
      ends = c.shared.ends_of_merged[(count + 1) % 2].data[row];
      merged = *reinterpret_cast<const Four<float>*>(c.shared.merged.data +
                                                     row * Config::head_dim_v + column);
    }
    const float keep = end_row<Config>(c.params, c.rows.head(row), ends.x, ends.y);
    const float inverse = inverse_of(ends.y, keep);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      merged.value[n] = Logits<Config>::normalise(merged.value[n], ends.y, keep, inverse);
    }
    store_four(c, row, column, merged.value);
    if (column == 0) store_ends(c, row, ends.x, ends.y);
  });
}

}  // namespace cuflash::fa2
