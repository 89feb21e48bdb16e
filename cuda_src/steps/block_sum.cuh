// The sum of one number of every thread of a block, added pairwise in a fixed order.
#pragma once

namespace cuflash::steps {

// The result is in thread 0. `sums` has room for one number of each thread.
template <int threads>
__device__ inline double block_sum(double* sums, double mine) {
  sums[threadIdx.x] = mine;
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
  }
  return sums[0];
}

}  // namespace cuflash::steps
