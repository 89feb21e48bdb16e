// Bias whose tiles the copy engine brings to shared memory.
#pragma once

#include "../fa3/params.cuh"
#include "../tile/numeric.cuh"
#include "../tile/pair_panels.cuh"
#include "added.cuh"

namespace cuflash {

struct StagedBiasParams {
  TensorMap bias_map;  // [batch, head, query, key]; broadcast axes have one element
  int entries;         // neighbouring batch entries that share one entry of the bias
  int own_entries;     // entries of the bias
  int own_heads;
  double inverse_unit;  // 1 over the unit of scores
  float inverse_unit_single;
};

// `of_rows`: whether the bias differs from query to query; if not, a tile has one row.
template <class Bias, class Storage, bool of_rows>
struct StagedBiasTerm : AddedTerm {
  static constexpr bool staged = true;
  using Compute = decltype(to_compute(Storage()));
  PairReader<Bias, of_rows> reader;
  Compute factor;

  template <class Params>
  __device__ StagedBiasTerm(const Params& params, const Lane& lane, double)
      : reader(lane.staged),
        factor(static_cast<Compute>(inverse_unit_of(Compute(), params.bias))) {}

  template <class Params>
  __device__ static StagedPlace staged_place(const Params& params, int batch, int head) {
    const StagedBiasParams& bias = params.bias;
    const bool shared = bias.own_entries == 1 || bias.own_heads == 1;
    return {&bias.bias_map, batch / bias.entries % bias.own_entries, bias.own_heads == 1 ? 0 : head,
            shared ? ptx::kEvictLast : ptx::kEvictFirst};
  }

  __device__ Compute operator()(Compute score, int di, int dj) const {
    return fma(reader.at(of_rows ? di : 0, dj), factor, score);
  }
};

}  // namespace cuflash
