// Merges chunks of a row's keys one after the other. Whoever merges them this way, a block that
// walks all of them or a kernel after the blocks, rounds the same numbers in the same order.
#pragma once

#include "softmax.cuh"

namespace cuflash {

// The reference and the sum of weights of all chunks so far, and the factors of the latest one.
template <class Config>
struct RunningEnds {
  using Compute = typename Config::Compute;
  Compute reference = -infinity<Compute>();
  Compute sum = 0;
  Compute keep = 0;    // of what was merged before
  Compute weight = 0;  // of the chunk's output, which is divided by the chunk's sum

  __device__ void add(Compute chunk_reference, Compute chunk_sum) {
    const Compute before = reference;
    reference = larger(before, chunk_reference);
    const Compute offset = subtrahend(reference);
    keep = Logits<Config>::exponential(before - offset);
    weight = rounded_product(chunk_sum, Logits<Config>::exponential(chunk_reference - offset));
    sum = fma(sum, keep, weight);
  }
  __device__ Compute merged(Compute before, Compute part) const {
    return fma(weight, part, rounded_product(before, keep));
  }
};

}  // namespace cuflash
