// The gradient of the sinks. The sink's weight in a row is Ps = exp(sink - lse). The sink has no
// value, so d loss / d sink = sum over rows of Ps (dlse - rowsum(dout * out)) = -sum of Ps * delta.
// A row that sees no key has output 0, whatever dout holds there: only dlse counts.
//
// One thread block does one query head of all batch entries. Every thread adds its rows in order,
// and the threads' sums are added pairwise: the order depends only on the shape. The sum is in
// double precision and is rounded once.
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "block_sum.cuh"

namespace cuflash::steps {

// The row of `delta` where a head's rows of a sequence begin. FlashAttention-1 has as many rows as
// there are queries; the others begin every packed sequence at a whole tile.
template <class Config>
__device__ inline long long first_row(const typename Config::Params& params, const Sequence& seq,
                                      int head) {
  if constexpr (Config::Lengths::packed) {
    if (params.padded_rows == params.shape.seqlen_q) {
      return workspace_row(params.shape, seq, head, 0);
    }
  }
  return (static_cast<long long>(seq.batch) * params.shape.heads_q + head) * params.padded_rows +
         seq.work_row0;
}

// One row's contribution: Ps * (dlse - rowsum(dout * out)).
template <class Config>
struct SinkRow {
  using Compute = typename Config::Compute;
  Compute lse = -infinity<Compute>();
  Compute delta = 0;

  __device__ inline void load(const typename Config::Params& params, const Sequence& seq, int head,
                              int row) {
    using Statistics = const typename Config::Statistics;
    if (row >= seq.seqlen_q) return;
    lse = *row_number<Statistics>(params.lse, seq, head, row);
    const long long first = first_row<Config>(params, seq, head);
    delta = static_cast<const Compute*>(params.delta)[first + row];
    if (!Mask<Config>::sees_nothing(seq, row)) return;
    delta = 0;
    if (params.dlse.data != nullptr) {
      delta = -*row_number<Statistics>(params.dlse, seq, head, row);
    }
  }

  // In a row that sees no key the sink has all the weight. The term is NaN if the sink is infinite.
  __device__ inline double term(const Sequence& seq, int row, Compute sink) const {
    if (lse == -infinity<Compute>()) return 0;  // neither keys nor a sink
    const bool dead = Mask<Config>::sees_nothing(seq, row);
    const double weight = dead ? Compute(1) + (sink - sink) : exp_of(sink - lse);
    return weight * -delta;
  }
};

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
  for (int entry = 0; entry < entries_of<Config>(params); ++entry) {
    const Sequence seq = sequence<Config>(params, entry);
    // A thread loads several rows at once, which hides the latency of memory.
    constexpr int together = 8;
#pragma unroll 1
    for (int begin = static_cast<int>(threadIdx.x); begin < seq.seqlen_q;
         begin += together * threads) {
      SinkRow<Config> rows[together];
#pragma unroll
      for (int i = 0; i < together; ++i) rows[i].load(params, seq, head, begin + i * threads);
#pragma unroll
      for (int i = 0; i < together; ++i) sum += rows[i].term(seq, begin + i * threads, sink);
    }
  }
  const double total = block_sum<threads>(sums, sum);
  if (threadIdx.x == 0) {
    static_cast<Storage*>(params.dsinks)[head] = from_compute<Storage>(static_cast<Compute>(total));
  }
}

}  // namespace cuflash::steps
