// Arrays of features whose tiles the copy engine brings to shared memory.
#pragma once

#include "../fa3/params.cuh"
#include "../tile/pair_panels.cuh"

namespace cuflash {

// Where the copy engine finds one, by the entries and heads that it has.
template <class Block>
__device__ __forceinline__ StagedPlace staged_place_of(const Block& block, const TensorMap& map,
                                                       int batch, int head) {
  const bool shared = block.own_entries == 1 || block.own_heads == 1;
  return {&map, batch / block.entries % block.own_entries, block.own_heads == 1 ? 0 : head,
          shared ? ptx::kEvictLast : ptx::kEvictFirst};
}

}  // namespace cuflash
