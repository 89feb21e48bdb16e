// The parts of rows whose keys were split -> rows: Dao et al., "Flash-Decoding for long-context
// inference" (2023).
//
// Of chunk c a row has an output o_c, divided by its sum of weights s_c, whose exponents have the
// reference r_c. With r the largest reference
//
//   sum = sum_c s_c e^(r_c - r),   out = sum_c s_c e^(r_c - r) o_c / sum,   lse = r + log(sum),
//
// added up in the order of the chunks. Ends of rows, such as a sink, follow here, once. One warp
// does one row, each lane some of its columns.
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "../tile/softmax.cuh"

namespace cuflash::steps {

// The largest reference of a row's chunks; the same in all lanes.
template <class Config>
__device__ inline typename Config::Compute largest_reference(const typename Config::Params& params,
                                                             const Sequence& seq, int head, int row,
                                                             const KvRange& chunks) {
  using Compute = typename Config::Compute;
  using Chunks = typename Config::Chunks;
  Compute largest = -infinity<Compute>();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int split = chunks.begin + lane; split < chunks.end; split += 32) {
    largest = larger(largest, Chunks::template number<Config>(
                                  params, params.kv_chunks.reference_parts, seq, head, row, split));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  return largest;
}

template <class Config>
__device__ inline void merge_row(const typename Config::Params& params, int entry, int head,
                                 int row) {
  using Compute = typename Config::Compute;
  using Chunks = typename Config::Chunks;
  using Output = typename Config::Output;
  constexpr int columns = (Config::head_dim_v + 31) / 32;  // of a lane
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int width = params.shape.head_dim_v;
  const Sequence seq = sequence<Config>(params, entry);
  const KvRange chunks =
      Chunks::template chunks_of<Config>(params, kv_range<Config>(seq, row / Config::block_q));
  Compute reference = largest_reference<Config>(params, seq, head, row, chunks);
  const Compute offset = subtrahend(reference);
  Compute sum = 0, output[columns] = {};
  for (int split = chunks.begin; split < chunks.end; ++split) {
    const auto number = [&](void* parts) {
      return Chunks::template number<Config>(params, parts, seq, head, row, split);
    };
    const Compute weight =
        number(params.kv_chunks.sum_parts) *
        Logits<Config>::exponential(number(params.kv_chunks.reference_parts) - offset);
    if (weight == Compute(0)) continue;  // it may have met a value that is not finite
    sum += weight;
    const Compute* const part =
        q_row<const Compute>(Chunks::template out<Config>(params, split), seq, head, row);
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const int column = lane + 32 * i;
      if (column < width) output[i] = fma(weight, part[column], output[i]);
    }
  }
  const Compute keep = end_row<Config>(params, head, reference, sum);
  const Compute inverse = inverse_of(sum, keep);
  auto* const out = q_row<Output>(params.out, seq, head, row);
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int column = lane + 32 * i;
    const Compute x = Logits<Config>::normalise(output[i], sum, keep, inverse);
    if (column < width) out[column] = from_compute<Output>(x);
  }
  if (lane == 0 && params.lse.data != nullptr) {
    *row_number<typename Config::Statistics>(params.lse, seq, head, row) =
        lse_of_row<Config>(seq, row, reference, sum);
  }
}

template <class Config>
__device__ inline void merge(const typename Config::Params& params) {
  const Shape& shape = params.shape;
  const long long rows = static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q;
  const long long warp = static_cast<long long>(blockIdx.x) * Config::warps + threadIdx.x / 32;
  if (warp >= rows) return;
  const long long head = warp / shape.seqlen_q;
  merge_row<Config>(params, static_cast<int>(head / shape.heads_q),
                    static_cast<int>(head % shape.heads_q),
                    static_cast<int>(warp % shape.seqlen_q));
}

}  // namespace cuflash::steps
