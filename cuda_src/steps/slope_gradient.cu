// The gradient of ALiBi's slopes, from the main kernel's sums of each thread and kv tile, see
// tile/pair_sums.cuh.
//
// One thread block does one slope: of a head of one batch entry, or of all of them. Every thread
// adds its sums in order, and the threads' sums are added pairwise, in double precision, rounded
// once.
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/product.cuh"
#include "block_sum.cuh"

namespace cuflash::steps {

template <class Config>
__device__ inline void slope_gradient(const typename Config::Params& params) {
  using Storage = typename Config::Storage;
  constexpr int threads = 32 * Config::warps;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  static_assert(threads * sizeof(double) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const auto* from = static_cast<const Storage*>(params.pair_sums);
  double sum = 0;
  for (long long entry = 0; entry < params.entries; ++entry) {
    const long long first = (entry * params.shape.heads_q + blockIdx.x) * params.sums_of_head;
    // Several loads at once hide the latency of memory.
#pragma unroll 8
    for (long long i = threadIdx.x; i < params.sums_of_head; i += threads) sum += from[first + i];
  }
  const double total = block_sum<threads>(reinterpret_cast<double*>(shared_bytes), sum);
  if (threadIdx.x == 0) {
    static_cast<Storage*>(params.dalibi_slopes)[blockIdx.x] = static_cast<Storage>(total);
  }
}

}  // namespace cuflash::steps
