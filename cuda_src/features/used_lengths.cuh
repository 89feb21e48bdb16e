// Used lengths: every batch entry uses its first queries and keys; the others do not count.
#pragma once

#include "../tile/sequence.cuh"

namespace cuflash {

struct UsedLengthsParams {
  const int* seqused_q;  // [batch]; null: every query counts
  const int* seqused_kv;
  long long bottom_right;  // whether the last used query has the position of the last used key

  // Lengths are clamped to the rows of the arrays.
  __device__ int queries(const Shape& shape, int batch) const {
    return seqused_q == nullptr ? shape.seqlen_q : max(0, min(seqused_q[batch], shape.seqlen_q));
  }
  __device__ int keys(const Shape& shape, int batch) const {
    return seqused_kv == nullptr ? shape.seqlen_kv
                                 : max(0, min(seqused_kv[batch], shape.seqlen_kv));
  }
  // The difference, in keys, between the position of query 0 and that without used lengths.
  __device__ int shift(const Shape& shape, int batch) const {
    if (bottom_right == 0) return 0;
    return (keys(shape, batch) - shape.seqlen_kv) - (queries(shape, batch) - shape.seqlen_q);
  }
};

// `Before` gives the bounds of the keys without used lengths.
template <class Before>
struct UsedLengths {
  static constexpr bool vary = true;
  static constexpr bool packed = false;
  static constexpr bool one_position = false;
  template <class Params>
  __device__ static Sequence of(const Params& params, int batch) {
    Sequence seq = Before::of(params, batch);
    seq.seqlen_q = params.used_lengths.queries(params.shape, batch);
    seq.seqlen_kv = params.used_lengths.keys(params.shape, batch);
    const int shift = params.used_lengths.shift(params.shape, batch);
    seq.q_last += shift;
    seq.q_first += shift;
    return seq;
  }
};

}  // namespace cuflash
