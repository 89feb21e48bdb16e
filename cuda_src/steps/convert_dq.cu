// dq = scale * the sum of its parts, rounded: from the layout of tile/gradient_accumulator.cuh to
// the rows of the tensor.
#include "../tile/gradient_accumulator.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/tile_io.cuh"

namespace cuflash::steps {

// Eight columns of a row: their places in the accumulator lie with four lanes of a fragment.
template <class Config>
__device__ inline void load_eight(typename Config::Compute (&x)[8],
                                  const typename Config::Compute* fragment, int row) {
  using Compute = typename Config::Compute;
  constexpr int lane_elements = Config::fragment_rows / 4;
  const Compute* from = fragment + row % 8 * 4 * lane_elements + row / 8 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair<Compute> pair = *reinterpret_cast<const Pair<Compute>*>(from + i * lane_elements);
    x[i * 2] = pair.x;
    x[i * 2 + 1] = pair.y;
  }
}

// One thread block does `rows` rows of a head, a thread eight columns of a row at a time.
template <class Config>
__device__ inline void convert_dq(const ConvertParams& params) {
  using Compute = typename Config::Compute;
  using Storage = typename Config::Storage;
  constexpr int parts = Config::head_dim / 8;  // of a row
  constexpr bool vector = Config::copies != CopyKind::element;
  const Shape& shape = params.shape;
  const int blocks = static_cast<int>(params.padded_rows) / Config::rows;  // of a head
  const int all_heads = blockIdx.x / blocks;
  const int begin = static_cast<int>(blockIdx.x) % blocks * Config::rows;
  const int head = all_heads % shape.heads_q;
  const Sequence seq = sequence(shape, all_heads / shape.heads_q);
  const Compute factor = static_cast<Compute>(params.scale);
#pragma unroll 2
  for (int i = threadIdx.x; i < Config::rows * parts; i += 32 * Config::warps) {
    const int row = begin + i / parts;
    const int column = i % parts * 8;
    if (row >= shape.seqlen_q || column >= shape.head_dim) continue;
    const int first = row / Config::fragment_rows * Config::fragment_rows;
    Compute x[8];
    load_eight<Config>(
        x,
        static_cast<const Compute*>(params.dq_accumulator) +
            accumulator_index<Config>(all_heads * params.padded_rows, first, column, 0),
        row - first);
    Storage* to = q_row<Storage>(params.dq, seq, head, row) + column;
    alignas(16) Storage rounded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) rounded[j] = from_compute<Storage>(x[j] * factor);
    if constexpr (vector) {
      constexpr int chunk = 16 / static_cast<int>(sizeof(Storage));
#pragma unroll
      for (int j = 0; j < 8; j += chunk) {
        if (column + j < shape.head_dim) {
          *reinterpret_cast<Chunk*>(to + j) = *reinterpret_cast<const Chunk*>(rounded + j);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < shape.head_dim) to[j] = rounded[j];
      }
    }
  }
}

}  // namespace cuflash::steps
