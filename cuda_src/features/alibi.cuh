// ALiBi: a score loses slope * |i + position - j|, in natural units.
#pragma once

#include "added.cuh"

namespace cuflash {

struct AlibiParams {
  const void* alibi_slopes;  // [batch or none, heads_q], contiguous, of the compute type
  void* pair_sums;           // see tile/pair_sums.cuh
  double inverse_unit;       // 1 over the unit of scores
  long long batch_stride;    // of the slopes
  int position;              // of query 0 among the keys
  float inverse_unit_single;
};

template <class Storage, bool summed_>
struct AlibiTerm : AddedTerm {
  static constexpr bool summed = summed_;
  static constexpr bool may_rise = true;
  using Compute = decltype(to_compute(Storage()));
  Compute slope;  // in units of scores, negative where a distant key loses
  Compute ahead;  // position of the lane's first query minus that of its first key

  template <class Params>
  __device__ AlibiTerm(const Params& params, const Lane& lane, double)
      : slope(-static_cast<const Compute*>(
                  params.alibi.alibi_slopes)[lane.batch * params.alibi.batch_stride + lane.head] *
              inverse_unit_of(Compute(), params.alibi)),
        ahead(static_cast<Compute>(lane.i + params.alibi.position +
                                   shift_of(params, lane.batch, 0) - lane.j)) {}

  template <class Params>
  __device__ static void* pair_sums(const Params& params) {
    return params.alibi.pair_sums;
  }

  // |i + position - j|. The product with the slope has no absolute value: slopes may be negative.
  __device__ Compute distance(int di, int dj) const {
    return fabs(ahead + static_cast<Compute>(di - dj));
  }
  __device__ Compute operator()(Compute score, int di, int dj) const {
    return fma(slope, distance(di, dj), score);
  }
  // Scores rise towards the diagonal where `slope` is negative, and away from it where positive.
  __device__ bool rises(int keys, Compute much) const {
    return fabs(slope) * static_cast<Compute>(keys) > much && (slope < 0) == (ahead < 0);
  }
  __device__ Compute partial(int di, int dj) const { return -distance(di, dj); }
};

}  // namespace cuflash
