// Merges the partial results of rows whose keys were split: Dao et al., "Flash-Decoding for
// long-context inference" (2023).
//
// For chunk c a row has an output o_c, divided by its sum of weights s_c; the exponents have the
// reference r_c. With r the largest reference
//
//   sum = sum_c s_c e^(r_c - r),   out = sum_c s_c e^(r_c - r) o_c / sum,   lse = r + log(sum),
//
// added up in an order that depends only on the number of chunks; for few queries chunk after chunk
// (tile/running_ends.cuh). Ends of rows, such as a sink, are applied here, once. One warp merges a
// row, or several warps of a block do. Each of these has neighbouring chunks; if chunks are added
// one after the other, it has all chunks and neighbouring columns. A lane has some of the columns.
#include "../ptx/dependent_launch.cuh"
#include "../tile/copy.cuh"
#include "../tile/mask.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "../tile/running_ends.cuh"
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

// The contribution of chunks [begin, end) to a row.
template <class Config>
struct MergedRow {
  using Compute = typename Config::Compute;
  static constexpr int columns =
      (Config::head_dim_v + 31) / 32 / Config::warps_of_row;  // of a lane
  Compute sum = 0;
  Compute output[columns] = {};

  // Each lane computes the weight of one chunk. Then all lanes read one chunk after the other, with
  // the loads of several chunks in flight.
  __device__ inline void add(const typename Config::Params& params, const Sequence& seq, int head,
                             int row, Compute offset, KvRange chunks) {
    using Chunks = typename Config::Chunks;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int width = params.shape.head_dim_v;
    const Compute* parts =
        q_row<const Compute>(Chunks::template out<Config>(params, chunks.begin), seq, head, row);
    const long long part = Chunks::template out_stride<Config>(params);
    for (int first = chunks.begin; first < chunks.end; first += 32) {
      Compute weight = 0;
      if (first + lane < chunks.end) {
        const auto number = [&](void* of) {
          return Chunks::template number<Config>(params, of, seq, head, row, first + lane);
        };
        weight = number(params.kv_chunks.sum_parts) *
                 Logits<Config>::exponential(number(params.kv_chunks.reference_parts) - offset);
      }
      const int count = min(32, chunks.end - first);
#pragma unroll Config::chunks_at_once
      for (int i = 0; i < count; ++i, parts += part) {
        const Compute of_chunk = __shfl_sync(0xffffffffu, weight, i);
        sum += of_chunk;
#pragma unroll
        for (int n = 0; n < columns; ++n) {
          const int column = lane + 32 * n;
          if (column < width) output[n] = fma(of_chunk, parts[column], output[n]);
        }
      }
    }
  }

  // One chunk after the other, each with the reference so far. Warps that share a row divide its
  // columns.
  __device__ inline Compute add_in_order(const typename Config::Params& params, const Sequence& seq,
                                         int head, int row, KvRange chunks) {
    using Chunks = typename Config::Chunks;
    static_assert(columns == 1, "a lane has one column");
    const int lane = static_cast<int>(threadIdx.x) % 32, column = first_column() + lane;
    const bool valid = column < params.shape.head_dim_v;
    const Compute* parts =
        q_row<const Compute>(Chunks::template out<Config>(params, chunks.begin), seq, head, row) +
        (valid ? column : 0);
    const long long part = Chunks::template out_stride<Config>(params);
    Compute before = -infinity<Compute>();  // the reference of the chunks before these
    for (int first = chunks.begin; first < chunks.end; first += 32) {
      // Each lane computes the factors of one chunk.
      const bool exists = first + lane < chunks.end;
      const auto number = [&](void* of) {
        return Chunks::template number<Config>(params, of, seq, head, row, first + lane);
      };
      const Compute own = exists ? number(params.kv_chunks.reference_parts) : -infinity<Compute>();
      const Compute of_chunk = exists ? number(params.kv_chunks.sum_parts) : Compute(0);
      Compute reference = larger(before, own);  // of all chunks up to this lane's
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const Compute other = __shfl_up_sync(0xffffffffu, reference, step);
        if (lane >= step) reference = larger(reference, other);
      }
      Compute earlier = __shfl_up_sync(0xffffffffu, reference, 1);
      if (lane == 0) earlier = before;
      const auto factors = chunk_factors<Config>(earlier, reference, own, of_chunk);
      const int count = min(32, chunks.end - first);
#pragma unroll Config::chunks_at_once
      for (int i = 0; i < count; ++i, parts += part) {
        const ChunkFactors<Compute> of{__shfl_sync(0xffffffffu, factors.keep, i),
                                       __shfl_sync(0xffffffffu, factors.weight, i)};
        output[0] = of.merged(output[0], *parts);
        sum = of.summed(sum);
      }
      before = __shfl_sync(0xffffffffu, reference, 31);
    }
    return before;
  }

  // The first of this warp's columns.
  __device__ static int first_column() {
    return static_cast<int>(threadIdx.x) / 32 % Config::warps_of_row * 32 * columns;
  }

  // Adds the results of the block's other warps, in order, to those of the first warp.
  __device__ inline void collect(Compute* shared) {
    constexpr int numbers = 32 * columns + 1;  // of a warp
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    Compute* const own = shared + warp * numbers;
#pragma unroll
    for (int n = 0; n < columns; ++n) own[lane + 32 * n] = output[n];
    if (lane == 0) own[numbers - 1] = sum;
    __syncthreads();
    if (warp != 0) return;
    for (int other = 1; other < Config::warps; ++other) {
      const Compute* const theirs = shared + other * numbers;
#pragma unroll
      for (int n = 0; n < columns; ++n) output[n] += theirs[lane + 32 * n];
      sum += theirs[numbers - 1];
    }
  }

  __device__ inline void store(const typename Config::Params& params, const Sequence& seq, int head,
                               int row, Compute reference) {
    using Output = typename Config::Output;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Compute keep = end_row<Config>(params, head, reference, sum);
    const Compute inverse = inverse_of(sum, keep);
    auto* const out = q_row<Output>(params.out, seq, head, row);
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      const int column = first_column() + lane + 32 * n;
      const Compute x = Logits<Config>::normalise(output[n], sum, keep, inverse);
      if (column < params.shape.head_dim_v) out[column] = from_compute<Output>(x);
    }
    if constexpr (Config::warps_of_row > 1) {
      if (first_column() != 0) return;
    }
    if (lane == 0 && params.lse.data != nullptr) {
      *row_number<typename Config::Statistics>(params.lse, seq, head, row) =
          lse_of_row<Config>(seq, row, reference, sum);
    }
  }
};

// This warp's share of a row's chunks.
template <class Config>
__device__ inline KvRange own_chunks(KvRange chunks) {
  if constexpr (!Config::shared_rows) return chunks;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int count = chunks.end - chunks.begin;
  return {chunks.begin + count * warp / Config::warps,
          chunks.begin + count * (warp + 1) / Config::warps};
}

template <class Config>
__device__ inline void merge(const typename Config::Params& params) {
  using Compute = typename Config::Compute;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const Shape& shape = params.shape;
  const long long rows = static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q;
  long long number = blockIdx.x;  // of the row
  if constexpr (!Config::shared_rows) {
    number = (number * Config::warps + threadIdx.x / 32) / Config::warps_of_row;
  }
  if (number >= rows) return;
  const long long all_heads = number / shape.seqlen_q;
  const int head = static_cast<int>(all_heads % shape.heads_q);
  int row = static_cast<int>(number % shape.seqlen_q);
  Sequence seq;
  if constexpr (Config::Lengths::packed) {
    seq = Config::Lengths::of_row(params, row);
    row -= static_cast<int>(seq.q_row0);
  } else {
    seq = sequence<Config>(params, static_cast<int>(all_heads / shape.heads_q));
  }
  const KvRange chunks = Config::Chunks::template chunks_of<Config>(
      params, kv_range<Config>(seq, row / Config::block_q));
  if constexpr (Config::overlaps) ptx::wait_for_kernel_before();
  if constexpr (Config::in_order) {
    MergedRow<Config> merged;
    const Compute last = merged.add_in_order(params, seq, head, row, chunks);
    merged.store(params, seq, head, row, last);
    return;
  }
  const Compute reference = largest_reference<Config>(params, seq, head, row, chunks);
  MergedRow<Config> merged;
  merged.add(params, seq, head, row, subtrahend(reference), own_chunks<Config>(chunks));
  if constexpr (Config::shared_rows) {
    merged.collect(reinterpret_cast<Compute*>(shared_bytes));
    if (threadIdx.x >= 32) return;
  }
  merged.store(params, seq, head, row, reference);
}

}  // namespace cuflash::steps
