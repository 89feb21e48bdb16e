// Merges two states of every row into the state over the keys of both. A state is out, which is
// divided by its sum of weights, and lse, the natural logarithm of that sum. Milakov and
// Gimelshein, "Online normalizer calculation for softmax" (2018).
//
//   lse = log(e^lse_0 + e^lse_1),   out = e^(lse_0 - lse) out_0 + e^(lse_1 - lse) out_1
//
// A state whose lse is minus infinity saw no key, and its out is not used. The result may overwrite
// either state: a lane reads each number before it writes it, and the warp reads lse before lane 0
// writes it.
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "../tile/sequence.cuh"

namespace cuflash {

struct MergeStatesParams {
  Tensor out_before;
  Tensor out_now;
  Tensor out;
  RowVector lse_before;
  RowVector lse_now;
  RowVector lse;
  Shape shape;
};

namespace steps {

// The weight of each state of a row, and the log-sum-exp of both.
template <class Compute>
struct StateWeights {
  Compute before;
  Compute now;
  Compute lse;
};
template <class Compute>
__device__ inline StateWeights<Compute> weights_of_states(Compute before, Compute now) {
  const Compute dead = -infinity<Compute>();
  if (before == dead && now == dead) return {0, 0, dead};
  const Compute largest = larger(before, now);
  const bool finite = dead < largest && largest < infinity<Compute>();
  const Compute origin = finite ? largest : 0;
  const Compute of_before = exp_of(before - origin), of_now = exp_of(now - origin);
  const Compute sum = of_before + of_now;
  return {of_before / sum, of_now / sum, log_of(sum) + origin};
}

// One warp for each row; the warps of the grid take the rows in turn.
template <class Config>
__device__ inline void merge_states(const typename Config::Params& params) {
  using Compute = typename Config::Compute;
  const Shape& shape = params.shape;
  const long long rows = static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q;
  const long long stride = static_cast<long long>(gridDim.x) * Config::warps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (long long row = static_cast<long long>(blockIdx.x) * Config::warps + threadIdx.x / 32;
       row < rows; row += stride) {
    const int i = static_cast<int>(row % shape.seqlen_q);
    const int head = static_cast<int>(row / shape.seqlen_q % shape.heads_q);
    const Sequence seq =
        sequence<Config>(params, static_cast<int>(row / shape.seqlen_q / shape.heads_q));
    const Compute before = *row_number<const Compute>(params.lse_before, seq, head, i);
    const Compute now = *row_number<const Compute>(params.lse_now, seq, head, i);
    const auto weights = weights_of_states(before, now);
    const auto* out_before = q_row<const Compute>(params.out_before, seq, head, i);
    const auto* out_now = q_row<const Compute>(params.out_now, seq, head, i);
    auto* const out = q_row<Compute>(params.out, seq, head, i);
    for (int column = lane; column < shape.head_dim_v; column += 32) {
      const Compute x = before == -infinity<Compute>() ? 0 : out_before[column];
      const Compute y = now == -infinity<Compute>() ? 0 : out_now[column];
      out[column] = rounded_product(weights.before, x) + rounded_product(weights.now, y);
    }
    __syncwarp();
    if (lane == 0) *row_number<Compute>(params.lse, seq, head, i) = weights.lse;
  }
}

}  // namespace steps
}  // namespace cuflash
