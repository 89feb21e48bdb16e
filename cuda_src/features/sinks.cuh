// Sinks: a learned logit of each query head that takes part in every row's softmax and has no
// value.
//
//   lse = log(sum_j exp(z_j) + exp(sink)),  out = sum_j exp(z_j - lse) v_j
//
// It enters once, at the end of a row; the backward pass needs nothing more, because P = exp(z -
// lse).
#pragma once

#include "../tile/softmax.cuh"

namespace cuflash {

struct SinksParams {
  const void* sinks;  // [heads_q], contiguous
};

template <class T>
struct Sinks {
  static constexpr bool finite_when_dead = true;

  template <class Config, class Compute>
  __device__ static Compute end(const typename Config::Params& params, int head, Compute& reference,
                                Compute& sum) {
    const Compute given = to_compute(static_cast<const T*>(params.sinks.sinks)[head]);
    const Compute sink = Logits<Config>::from_natural(given);
    const Compute top = larger(reference, sink);
    const Compute offset = subtrahend(top);
    const Compute keep = Logits<Config>::exponential(reference - offset);
    sum = sum * keep + Logits<Config>::exponential(sink - offset);
    reference = top;
    return keep;
  }
};

}  // namespace cuflash
