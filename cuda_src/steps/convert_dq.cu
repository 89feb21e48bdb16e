// dq = scale * the accumulated sums, rounded: from the layout of tile/gradient_accumulator.cuh to
// the rows of the tensor.
#include "../tile/gradient_accumulator.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/tile_io.cuh"

namespace cuflash::steps {

// The part that a warp converts at a time: the rows of a fragment, and 64, 32 or 16 columns, the
// largest that divides head_dim.
template <class Config>
struct ConvertTypes {
  static constexpr int columns = Config::head_dim % 64 == 0   ? 64
                                 : Config::head_dim % 32 == 0 ? 32
                                                              : 16;
  using Part =
      WarpTile<typename Config::Compute, Config::fragment_rows, Config::fragment_rows, columns>;
  using Staging = SharedTile<typename Config::Storage, Config::fragment_rows, columns>;
};

template <class Config>
struct ConvertStorage {
  using Staging = typename ConvertTypes<Config>::Staging;
  SharedArray<typename Config::Storage, Staging::rows * Staging::columns> part[Config::warps];
};

// Stores scale * part in its rows of the tensor, 16 bytes at a time if they are aligned.
template <class Config, class Part>
__device__ inline void store_part(const typename Config::Params& params, Part& part,
                                  ConvertStorage<Config>& shared, typename Config::Storage* to,
                                  int valid_rows, int column0) {
  using Compute = typename Config::Compute;
  const Compute factor = static_cast<Compute>(params.scale);
  if constexpr (Config::copies == CopyKind::element) {
    store_rounded<false>(part, to, params.dq.row_stride, valid_rows, column0, params.shape.head_dim,
                         factor);
  } else {
    using Staging = typename ConvertTypes<Config>::Staging;
    const Staging staging{shared.part[threadIdx.x / 32].data};
    part.for_each([&](Compute& x, int, int, int, int) { x *= factor; });
    __syncwarp();  // the part before has been copied out
    store_shared<Config::architecture>(part, staging, 0, Zero{});
    __syncwarp();
    copy_out(staging, 0, Staging::rows, to + column0, params.dq.row_stride, valid_rows,
             params.shape.head_dim - column0);
  }
}

// One thread block does `rows` rows of a head.
template <class Config>
__device__ inline void convert_dq(const typename Config::Params& params) {
  using Part = typename ConvertTypes<Config>::Part;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ConvertStorage<Config>*>(shared_bytes);
  static_assert(sizeof(ConvertStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  constexpr int parts = Config::head_dim / Part::columns;  // of a row
  const Shape& shape = params.shape;
  const int blocks = static_cast<int>(params.padded_rows) / Config::rows;  // of a head
  const int all_heads = blockIdx.x / blocks;
  const int begin = static_cast<int>(blockIdx.x) % blocks * Config::rows;
  const int head = all_heads % shape.heads_q;
  const Sequence seq = sequence_of_row<Config>(params, all_heads / shape.heads_q, begin);
  const auto* accumulator = static_cast<const typename Config::Compute*>(params.dq_accumulator);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int i = warp; i < Config::rows / Part::rows * parts; i += Config::warps) {
    const int padded = begin + i / parts * Part::rows;
    const int row = row_of_sequence<Config>(seq, padded);
    const int column = i % parts * Part::columns;
    if (row >= rows_there<Config>(shape, seq) || column >= shape.head_dim) continue;
    Part part;
    load_from_accumulator<Config, ByRows>(accumulator, part, all_heads * params.padded_rows, padded,
                                          column);
    store_part(params, part, shared, q_row<typename Config::Storage>(params.dq, seq, head, row),
               rows_there<Config>(shape, seq) - row, column);
  }
}

}  // namespace cuflash::steps
