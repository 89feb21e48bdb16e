// Used lengths: of every batch entry the first queries and keys count, the others do not.
#pragma once

#include "../tile/sequence.cuh"

namespace cuflash {

struct UsedLengthsParams {
  const int* seqused_q;  // [batch]; null: every query counts
  const int* seqused_kv;
  long long bottom_right;  // whether the last query that counts stands at the last key that does

  // Clamped to the rows that are there: no length leads out of an array.
  __device__ int queries(const Shape& shape, int batch) const {
    return seqused_q == nullptr ? shape.seqlen_q : max(0, min(seqused_q[batch], shape.seqlen_q));
  }
  __device__ int keys(const Shape& shape, int batch) const {
    return seqused_kv == nullptr ? shape.seqlen_kv
                                 : max(0, min(seqused_kv[batch], shape.seqlen_kv));
  }
  // By how much query 0 stands at another key than where every row counts.
  __device__ int shift(const Shape& shape, int batch) const {
    if (bottom_right == 0) return 0;
    return (keys(shape, batch) - shape.seqlen_kv) - (queries(shape, batch) - shape.seqlen_q);
  }
};

// `Before` knows the bounds of the keys as they are where every row counts.
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
