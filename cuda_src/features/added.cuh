// What score terms that add a number have in common.
#pragma once

#include "../tile/score.cuh"

namespace cuflash {

// 1 over the unit of scores, in the compute type, from the parameters of such a term.
template <class Block>
__device__ inline double inverse_unit_of(double, const Block& block) {
  return block.inverse_unit;
}
template <class Block>
__device__ inline float inverse_unit_of(float, const Block& block) {
  return block.inverse_unit_single;
}

}  // namespace cuflash
