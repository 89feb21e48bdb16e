// Windows: the first key that a query sees. The last key is in the shape, as under a causal mask.
#pragma once

#include "../tile/sequence.cuh"

namespace cuflash {

struct WindowParams {
  long long first;  // the first key that query 0 sees; may be negative
};

struct WindowedLengths {
  static constexpr bool vary = false;
  static constexpr bool packed = false;
  static constexpr bool one_position = false;
  template <class Params>
  __device__ static Sequence of(const Params& params, int batch) {
    Sequence seq = FixedLengths::of(params, batch);
    seq.q_first = static_cast<int>(params.window.first);
    return seq;
  }
};

}  // namespace cuflash
