// delta = rowsum(dout * out) - dlse for each query row, which every backward pass needs (Dao et al.
// 2022, Algorithm 4, line 19). The gradient of the log-sum-exp enters here: the derivative of lse
// by S is P, so dS = P * (dP - delta).
#include "../tile/numeric.cuh"
#include "../tile/sequence.cuh"

namespace cuflash::steps {

// One warp for each row; the warps of the grid take the rows in turn.
template <class Config>
__device__ inline void delta(const typename Config::Params& params) {
  using Compute = typename Config::Compute;
  const Shape& shape = params.shape;
  const long long rows = static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q;
  const long long stride = static_cast<long long>(gridDim.x) * Config::warps;
  const int lane = threadIdx.x % 32;
  for (long long row = static_cast<long long>(blockIdx.x) * Config::warps + threadIdx.x / 32;
       row < rows; row += stride) {
    const int i = static_cast<int>(row % shape.seqlen_q);
    const int head = static_cast<int>(row / shape.seqlen_q % shape.heads_q);
    const Sequence seq =
        sequence<Config>(params, static_cast<int>(row / shape.seqlen_q / shape.heads_q));
    const auto* out = q_row<const typename Config::Output>(params.out, seq, head, i);
    const auto* dout = q_row<const typename Config::Storage>(params.dout, seq, head, i);
    Compute sum = 0;
    for (int column = lane; column < shape.head_dim_v; column += 32) {
      sum = fma(to_compute(dout[column]), to_compute(out[column]), sum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane == 0) {
      if (params.dlse.data != nullptr) {
        sum -= *row_number<const typename Config::Statistics>(params.dlse, seq, head, i);
      }
      static_cast<Compute*>(params.delta)[row] = sum;
    }
  }
}

}  // namespace cuflash::steps
