// The gradient of a bias that is the same for all queries or for all keys, from the partial sums of
// every entry and head, see steps/bias_gradient.cu.
//
// One thread sums each number of the result. If the bias has a single number for all pairs of a
// head, the threads of one block sum it together. The order is fixed. The sum is in double
// precision and is rounded once.
#include "../tile/copy.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "block_sum.cuh"

namespace cuflash::steps {

template <class Config>
__device__ inline void reduce_bias(const typename Config::Params& params) {
  using Bias = typename Config::Storage;
  constexpr int threads = 32 * Config::warps;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  static_assert(threads * sizeof(double) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const Shape& shape = params.shape;
  const PairArray& to = params.dbias;
  const int length = static_cast<int>(params.length);
  const int blocks = Config::single ? 1 : ceil_div(length, threads);  // of an entry and head
  const int block = static_cast<int>(blockIdx.x) % blocks;
  const int head = static_cast<int>(blockIdx.x) / blocks % static_cast<int>(params.bias_heads);
  const int entry = static_cast<int>(blockIdx.x) / blocks / static_cast<int>(params.bias_heads);
  const int first = block * threads + static_cast<int>(threadIdx.x);
  const int heads = params.bias_heads == 1 ? shape.heads_q : 1;  // heads that share it
  const int entries = shape.batch / static_cast<int>(params.bias_batch);
  double sum = 0;
  for (int e = 0; e < entries; ++e) {
    // Several loads at once hide the latency of memory.
#pragma unroll 4
    for (int h = 0; h < heads; ++h) {
      const long long part = static_cast<long long>(entry * entries + e) * shape.heads_q + head + h;
      const auto* from =
          static_cast<const typename Config::Compute*>(params.bias_parts) + part * length;
      for (int i = first; i < length; i += threads) {
        sum += from[i];
        if (!Config::single) break;
      }
    }
  }
  if constexpr (Config::single) {
    sum = block_sum<threads>(reinterpret_cast<double*>(shared_bytes), sum);
    if (threadIdx.x != 0) return;
  } else if (first >= length) {
    return;
  }
  // One of the two strides is 0.
  const long long place = Config::single ? 0 : first;
  static_cast<Bias*>(to.data)[entry * to.batch_stride + head * to.head_stride +
                              place * (to.row_stride + to.column_stride)] =
      from_compute<Bias>(static_cast<typename Config::Compute>(sum));
}

}  // namespace cuflash::steps
