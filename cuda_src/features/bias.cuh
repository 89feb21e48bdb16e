// Bias: adds a number to the score of every pair, in natural units.
#pragma once

#include "../tile/numeric.cuh"
#include "added.cuh"
#include "pairs.cuh"

namespace cuflash {

struct BiasParams {
  const void* bias;
  // In elements; 0 along an axis that the bias broadcasts.
  long long bias_batch_stride;
  long long bias_head_stride;
  long long bias_row_stride;
  long long bias_column_stride;
  int entries;          // neighbouring batch entries that share one entry of the bias
  int own_entries;      // entries of the bias
  double inverse_unit;  // 1 over the unit of scores
  float inverse_unit_single;
};

// `of_rows`, `of_keys`: whether the bias differs from query to query, and from key to key.
template <class Bias, class Storage, bool of_rows, bool of_keys>
struct BiasTerm : AddedTerm {
  using Compute = decltype(to_compute(Storage()));
  LanePairs<Bias, of_rows, of_keys> pairs;
  Compute factor;

  template <class Params>
  __device__ BiasTerm(const Params& params, const Lane& lane, double)
      : pairs(params.bias, params.bias.bias, params.bias.bias_batch_stride,
              params.bias.bias_head_stride, params.bias.bias_row_stride,
              params.bias.bias_column_stride, params.shape, lane),
        factor(static_cast<Compute>(inverse_unit_of(Compute(), params.bias))) {}

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return fma(static_cast<Compute>(to_compute(pairs.at(di, dj))), factor, score);
  }
};

}  // namespace cuflash
