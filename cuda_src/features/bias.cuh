// Bias: a number of every pair is added to its score, in natural units.
#pragma once

#include "../tile/numeric.cuh"
#include "added.cuh"

namespace cuflash {

struct BiasParams {
  const void* bias;
  // In elements; 0 along an axis that it broadcasts.
  long long bias_batch_stride;
  long long bias_head_stride;
  long long bias_row_stride;
  long long bias_column_stride;
  int entries;          // neighbouring ones of the batch that share one of the bias
  int own_entries;      // of the bias
  double inverse_unit;  // 1 over the unit of scores
  float inverse_unit_single;
};

// `of_rows`, `of_keys`: whether it differs from query to query, and from key to key.
template <class Bias, class Storage, bool of_rows, bool of_keys>
struct BiasTerm : AddedTerm {
  using Compute = decltype(to_compute(Storage()));
  const char* first;     // of the lane's first query and key
  long long row_stride;  // in bytes
  long long column_stride;
  int rows_left;  // from the lane's first query to the last one
  int keys_left;
  Compute factor;

  template <class Params>
  __device__ BiasTerm(const Params& params, const Lane& lane, double)
      : row_stride(params.bias.bias_row_stride * sizeof(Bias)),
        column_stride(params.bias.bias_column_stride * sizeof(Bias)),
        rows_left(params.shape.seqlen_q - 1 - lane.i),
        keys_left(params.shape.seqlen_kv - 1 - lane.j),
        factor(static_cast<Compute>(inverse_unit_of(Compute(), params.bias))) {
    const int entry = lane.batch / params.bias.entries % params.bias.own_entries;
    first = reinterpret_cast<const char*>(static_cast<const Bias*>(params.bias.bias) +
                                          entry * params.bias.bias_batch_stride +
                                          lane.head * params.bias.bias_head_stride);
    if constexpr (of_rows) first += lane.i * row_stride;
    if constexpr (of_keys) first += lane.j * column_stride;
  }

  // What lies beyond the lengths is hidden later; the last number stands for it.
  __device__ Compute operator()(Compute score, int di, int dj) const {
    const char* from = first;
    if constexpr (of_rows) from += min(di, rows_left) * row_stride;
    if constexpr (of_keys) from += min(dj, keys_left) * column_stride;
    return fma(static_cast<Compute>(to_compute(*reinterpret_cast<const Bias*>(from))), factor,
               score);
  }
};

}  // namespace cuflash
