// dq = scale * the sum of its parts, rounded: from the layout of tile/gradient_accumulator.cuh to
// the rows of the tensor.
#include "../tile/gradient_accumulator.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/tile_io.cuh"

namespace cuflash::steps {

// Eight columns of the rows `row`, `row` + 8, ... of a fragment: they lie side by side in the
// accumulator, four lanes' elements.
template <class Config>
struct EightColumns {
  using Compute = typename Config::Compute;
  static constexpr int rows = Config::fragment_rows / 8;
  Compute value[rows][8];

  __device__ EightColumns(const Compute* fragment, int row) {
    constexpr int lane_elements = 2 * rows;
    const Compute* from = fragment + row * 4 * lane_elements;
#pragma unroll
    for (int i = 0; i < 4 * lane_elements; i += 2) {
      const Pair<Compute> pair = *reinterpret_cast<const Pair<Compute>*>(from + i);
      const int group = i % lane_elements / 2;
      value[group][i / lane_elements * 2] = pair.x;
      value[group][i / lane_elements * 2 + 1] = pair.y;
    }
  }

  // One of the rows times `factor`, rounded -> eight columns of a tensor, as far as they are valid.
  __device__ void store(int group, typename Config::Storage* to, int valid_columns,
                        Compute factor) const {
    using Storage = typename Config::Storage;
    alignas(16) Storage rounded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) rounded[j] = from_compute<Storage>(value[group][j] * factor);
    constexpr bool vector = Config::copies != CopyKind::element;
    constexpr int step = vector ? 16 / static_cast<int>(sizeof(Storage)) : 1;
#pragma unroll
    for (int j = 0; j < 8; j += step) {
      if (j >= valid_columns) break;
      if constexpr (vector) {
        *reinterpret_cast<Chunk*>(to + j) = *reinterpret_cast<const Chunk*>(rounded + j);
      } else {
        to[j] = rounded[j];
      }
    }
  }
};

// One thread block does `rows` rows of a head, a thread eight columns of a fragment's rows that lie
// eight apart at a time.
template <class Config>
__device__ inline void convert_dq(const ConvertParams& params) {
  using Compute = typename Config::Compute;
  using Eight = EightColumns<Config>;
  constexpr int parts = Config::head_dim / 8;  // of a row
  const Shape& shape = params.shape;
  const int blocks = static_cast<int>(params.padded_rows) / Config::rows;  // of a head
  const int all_heads = blockIdx.x / blocks;
  const int begin = static_cast<int>(blockIdx.x) % blocks * Config::rows;
  const int head = all_heads % shape.heads_q;
  const Sequence seq = sequence(shape, all_heads / shape.heads_q);
  const auto* accumulator = static_cast<const Compute*>(params.dq_accumulator);
  const Compute factor = static_cast<Compute>(params.scale);
#pragma unroll 2
  for (int i = threadIdx.x; i < Config::rows * parts / Eight::rows; i += 32 * Config::warps) {
    const int column = i % parts * 8;
    const int first = begin + i / parts / 8 * Config::fragment_rows;
    const int row = i / parts % 8;
    if (first + row >= shape.seqlen_q || column >= shape.head_dim) continue;
    const Eight eight(
        accumulator + accumulator_index<Config>(all_heads * params.padded_rows, first, column, 0),
        row);
#pragma unroll
    for (int group = 0; group < Eight::rows; ++group) {
      const int query = first + row + group * 8;
      if (query >= shape.seqlen_q) break;
      eight.store(group, q_row<typename Config::Storage>(params.dq, seq, head, query) + column,
                  shape.head_dim - column, factor);
    }
  }
}

}  // namespace cuflash::steps
