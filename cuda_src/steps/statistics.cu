// Computes delta and lse of each query row for a backward pass over kv tiles, and clears the
// accumulator of dQ.
//
//   delta = rowsum(dout * out) - dlse   (Dao et al. 2022, Algorithm 4, line 19; the gradient of the
//                                        log-sum-exp enters here since dS = P * (dP - delta))
//   row_lse = lse in the units of the logits; plus infinity for a dead row and for one beyond the
//             length, which makes its P = exp(s - lse) zero
//
// Both are contiguous over [batch, heads_q, padded_rows], so that a tile of them is copied 16 bytes
// at a time. One thread block does `rows` rows of a head. It also clears counters, and the dQ
// accumulator of its rows unless the main kernel does.
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/score.cuh"
#include "../tile/sequence.cuh"
#include "../tile/softmax.cuh"

namespace cuflash::steps {

// Loads `count` neighbouring elements: 16 bytes at a time if they are whole chunks of aligned rows,
// otherwise one by one, with zeros from `valid` on. Sums over the elements are the same in both
// cases.
template <bool vector, int count, class T, class Compute>
__device__ inline void load_elements(Compute (&to)[count], const T* from, int valid) {
  if constexpr (vector && count * sizeof(T) % 16 == 0) {
    constexpr int chunk = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < count; i += chunk) {
      alignas(16) T elements[chunk];
      *reinterpret_cast<Chunk*>(elements) = *reinterpret_cast<const Chunk*>(from + i);
#pragma unroll
      for (int j = 0; j < chunk; ++j) to[i + j] = to_compute(elements[j]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = i < valid ? to_compute(from[i]) : Compute(0);
  }
}

// The lanes that share a row, and the elements that each of them loads at a time.
template <class Config>
struct RowShare {
  static constexpr int elements = 16 / static_cast<int>(sizeof(typename Config::Storage));
  static constexpr int lanes = largest_power_of_two_in(32, Config::head_dim_v / elements);
};

// This lane's part of rowsum(dout * out).
template <class Config>
__device__ inline typename Config::Compute row_product(const typename Config::Params& params,
                                                       const Sequence& seq, int head, int row,
                                                       int lane) {
  using Compute = typename Config::Compute;
  using Share = RowShare<Config>;
  constexpr bool vector = Config::copies != CopyKind::element;
  const auto* out = q_row<const typename Config::Output>(params.out, seq, head, row);
  const auto* dout = q_row<const typename Config::Storage>(params.dout, seq, head, row);
  Compute sum = 0;
#pragma unroll
  for (int begin = 0; begin < Config::head_dim_v; begin += Share::lanes * Share::elements) {
    const int column = begin + lane * Share::elements;
    const int valid = params.shape.head_dim_v - column;
    if (valid <= 0) break;
    Compute a[Share::elements], b[Share::elements];
    load_elements<vector>(a, dout + column, valid);
    load_elements<vector>(b, out + column, valid);
#pragma unroll
    for (int i = 0; i < Share::elements; ++i) sum = fma(a[i], b[i], sum);
  }
  return sum;
}

template <class Config>
__device__ inline void clear_accumulator(const typename Config::Params& params,
                                         long long first_row) {
  constexpr int chunks =
      Config::rows * Config::head_dim * static_cast<int>(sizeof(typename Config::Compute)) / 16;
  auto* to = reinterpret_cast<Chunk*>(
      static_cast<typename Config::Compute*>(params.dq_accumulator) + first_row * Config::head_dim);
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks; i += 32 * Config::warps) to[i] = Chunk{};
}

// One row. The first of its lanes holds lse and dlse.
template <class Config>
struct Row {
  using Compute = typename Config::Compute;
  Compute sum = 0;                       // of this lane
  Compute given = -infinity<Compute>();  // lse
  Compute dlse = 0;

  __device__ inline void load(const typename Config::Params& params, const Sequence& seq, int head,
                              int row, int lane) {
    using Statistics = const typename Config::Statistics;
    if (row >= rows_there<Config>(params.shape, seq)) return;
    sum = row_product<Config>(params, seq, head, row, lane);
    if (lane != 0) return;
    given = *row_number<Statistics>(params.lse, seq, head, row);
    if (params.dlse.data != nullptr) dlse = *row_number<Statistics>(params.dlse, seq, head, row);
  }

  // Adds up the lanes and writes to row `to` of the workspace.
  template <int lanes>
  __device__ inline void finish(const typename Config::Params& params, long long to, int lane) {
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane != 0) return;
    Compute lse = infinity<Compute>();
    if (given != -infinity<Compute>()) {
      lse = Logits<Config>::from_natural(given);
      if (lse == infinity<Compute>()) lse -= lse;  // NaN: the row is not dead; its sum overflowed
    }
    static_cast<Compute*>(params.row_lse)[to] = lse;
    static_cast<Compute*>(params.delta)[to] = lse == infinity<Compute>() ? 0 : sum - dlse;
  }
};

template <class Config>
__device__ inline void statistics(const typename Config::Params& params) {
  constexpr int lanes = RowShare<Config>::lanes;
  const Shape& shape = params.shape;
  const int blocks = static_cast<int>(params.padded_rows) / Config::rows;  // of a head
  const int all_heads = blockIdx.x / blocks;
  const int begin = static_cast<int>(blockIdx.x) % blocks * Config::rows;
  const int head = all_heads % shape.heads_q;
  const Sequence seq = sequence_of_row<Config>(params, all_heads / shape.heads_q, begin);
  const int first = row_of_sequence<Config>(seq, begin);
  const long long first_row = all_heads * params.padded_rows + begin;

  if (all_heads < params.cleared) clear_accumulator<Config>(params, first_row);
  for (int i = threadIdx.x; i < Config::turns; i += 32 * Config::warps) {
    static_cast<int*>(params.turns)[static_cast<long long>(blockIdx.x) * Config::turns + i] = 0;
  }
  // A thread loads several rows at once, which hides the latency of memory.
  constexpr int rows_at_once = 32 * Config::warps / lanes;
  constexpr int together = 4 * rows_at_once <= Config::rows ? 4 : 1;
  static_assert(Config::rows % (together * rows_at_once) == 0, "whole rounds");
  const int lane = static_cast<int>(threadIdx.x) % lanes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) / lanes; i < Config::rows;
       i += together * rows_at_once) {
    Row<Config> rows[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      rows[j].load(params, seq, head, first + i + j * rows_at_once, lane);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) {
      // Only after all loads are issued: otherwise the loads of one row would wait for those of
      // another.
      rows[j].given = lse_or_dead<Config>(seq, first + i + j * rows_at_once, rows[j].given);
      rows[j].template finish<lanes>(params, first_row + i + j * rows_at_once, lane);
    }
  }
}

}  // namespace cuflash::steps
