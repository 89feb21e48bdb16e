// The gradient of the sinks. A row's weight of its sink is Ps = exp(sink - lse); as the sink has no
// value, d loss / d sink = sum over rows of Ps (dlse - rowsum(dout * out)) = -sum of Ps * delta.
// A row that sees no key has output 0, whatever dout holds there: dlse alone counts.
//
// One thread block does one query head of all batch entries. Every thread adds its rows in order,
// and threads are added pairwise: the sum does not depend on anything but the shape. It is kept in
// double precision and rounded once.
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"

namespace cuflash::steps {

// Ps * (dlse - rowsum(dout * out)) of a row.
template <class Config>
__device__ inline double sink_term(const typename Config::Params& params, const Sequence& seq,
                                   int head, int row, typename Config::Compute sink) {
  using Compute = typename Config::Compute;
  using Statistics = const typename Config::Statistics;
  const Compute lse = *row_number<Statistics>(params.lse, seq, head, row);
  if (lse == -infinity<Compute>()) return 0;  // neither keys nor a sink
  if (Mask<Config>::sees_nothing(seq, row)) {
    const Compute whole = 1 + (sink - sink);  // all the weight is the sink's; NaN if it is infinite
    if (params.dlse.data == nullptr) return 0 * whole;
    return whole * *row_number<Statistics>(params.dlse, seq, head, row);
  }
  const long long first =
      (static_cast<long long>(seq.batch) * params.shape.heads_q + head) * params.padded_rows;
  const Compute delta = static_cast<const Compute*>(params.delta)[first + row];
  return static_cast<double>(exp_of(sink - lse)) * -delta;
}

template <class Config>
__device__ inline void sink_gradient(const typename Config::Params& params) {
  using Compute = typename Config::Compute;
  using Storage = typename Config::Storage;
  constexpr int threads = 32 * Config::warps;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto* const sums = reinterpret_cast<double*>(shared_bytes);
  static_assert(threads * sizeof(double) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const int head = static_cast<int>(blockIdx.x);
  const Compute sink = to_compute(static_cast<const Storage*>(params.sinks.sinks)[head]);
  double sum = 0;
  for (int batch = 0; batch < params.shape.batch; ++batch) {
    const Sequence seq = sequence<Config>(params, batch);
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.x); row < seq.seqlen_q; row += threads) {
      sum += sink_term<Config>(params, seq, head, row, sink);
    }
  }
  sums[threadIdx.x] = sum;
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < distance) sums[threadIdx.x] += sums[threadIdx.x + distance];
  }
  if (threadIdx.x == 0) {
    static_cast<Storage*>(params.dsinks)[head] =
        from_compute<Storage>(static_cast<Compute>(sums[0]));
  }
}

}  // namespace cuflash::steps
