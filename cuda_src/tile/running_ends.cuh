// Merges chunks of a row's keys one after the other. A block that walks all chunks and a kernel
// after the blocks both do it this way: they round the same numbers in the same order.
#pragma once

#include "softmax.cuh"

namespace cuflash {

// The factors with which a chunk joins the chunks before it.
template <class Compute>
struct ChunkFactors {
  Compute keep;    // of what was merged before
  Compute weight;  // of the chunk's output, which is divided by the chunk's sum

  __device__ Compute merged(Compute before, Compute part) const {
    return fma(weight, part, rounded_product(before, keep));
  }
  // The sum of weights of the chunks so far, from that of the chunks before.
  __device__ Compute summed(Compute before) const { return fma(before, keep, weight); }
};

// `before` is the reference of the chunks before, `reference` that with the chunk: the larger of
// `before` and the chunk's own.
template <class Config, class Compute>
__device__ inline ChunkFactors<Compute> chunk_factors(Compute before, Compute reference,
                                                      Compute own, Compute sum) {
  const Compute offset = subtrahend(reference);
  return {Logits<Config>::exponential(before - offset),
          rounded_product(sum, Logits<Config>::exponential(own - offset))};
}

}  // namespace cuflash
