// dK and dV of FlashAttention-3's backward pass where several blocks share each kv tile: the sum of
// their parts, see backward_parts.cuh, rounded. Parts are added in a fixed order, so that the sum
// is the same from run to run. With Config::cut_last only some tiles have parts.
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/store_staged.cuh"
#include "backward_parts.cuh"

namespace cuflash::fa3 {

// The columns that a warp adds up; they divide every width. Each lane reads 64 bytes of a part.
constexpr int kColumnsOfSum = 32;
using SumTile = WarpTile<float, kRowsOfFragment, kRowsOfFragment, kColumnsOfSum>;

template <class Config>
struct SumStorage {
  StagedRows staging[Config::warps];
};

// Rows and columns of one of the two gradients.
struct SumPlace {
  int batch;
  int head;  // of the tensor
  int row;
  int column;
  long long row_of_parts;  // where the first part begins in the workspace
};

// Finds the rows of fragment number `fragment`. Returns whether they exist.
template <class Config>
__device__ inline bool find_rows(const typename Config::Params& params, long long fragment,
                                 SumPlace& at) {
  const Shape& shape = params.shape;
  if constexpr (Config::cut_last) {
    const int block_kv = static_cast<int>(params.padded_keys);
    const int tiles = ceil_div(shape.seqlen_kv, block_kv);  // of a head
    const int fragments = block_kv / kRowsOfFragment;       // of a tile
    const long long cut = fragment / fragments;
    const long long tile = params.whole_tiles + cut;
    const long long head = tile / tiles;  // among all heads
    const int row = static_cast<int>(fragment % fragments) * kRowsOfFragment;
    at.batch = static_cast<int>(head / shape.heads_kv);
    at.head = static_cast<int>(head % shape.heads_kv);
    at.row = static_cast<int>(tile % tiles) * block_kv + row;
    at.row_of_parts = cut * params.parts * block_kv + row;
    return head < static_cast<long long>(shape.batch) * shape.heads_kv && at.row < shape.seqlen_kv;
  }
  const int rows = ceil_div(shape.seqlen_kv, kRowsOfFragment);  // fragments along a head's rows
  const long long head = fragment / rows;                       // among all heads
  at.batch = static_cast<int>(head / shape.heads_kv);
  at.head = static_cast<int>(head % shape.heads_kv);
  at.row = static_cast<int>(fragment % rows) * kRowsOfFragment;
  at.row_of_parts = head * static_cast<int>(params.parts) * params.padded_keys + at.row;
  return head < static_cast<long long>(shape.batch) * shape.heads_kv;
}

// Adds up the parts of a place, which lie in `memory` with `columns` columns, and stores the sum in
// the tensor, whose heads have `valid` columns.
template <class Config, int columns>
__device__ inline void sum_place(const typename Config::Params& params, const SumPlace& at,
                                 const void* memory, const Tensor& tensor, int valid,
                                 StagedRows& staging) {
  using Storage = typename Config::Storage;
  if (at.column >= valid) return;
  const int parts = static_cast<int>(params.parts);
  const auto* const from = static_cast<const float*>(memory);
  SumTile sum;
  load_part<columns>(sum, from, at.row_of_parts, at.column);
  // Several loads at once hide the latency of memory.
#pragma unroll 4
  for (int part = 1; part < parts; ++part) {
    SumTile more;
    load_part<columns>(more, from, at.row_of_parts + part * params.padded_keys, at.column);
    sum.for_each(
        [&](float& x, int m, int n, int group, int which) { x += more.value[m][n][group][which]; });
  }
  const Sequence seq = sequence<Config>(params, at.batch);
  store_staged(sum, staging, kv_row<Storage>(tensor, seq, at.head, at.row) + at.column,
               tensor.row_stride, seq.rows_kv - at.row, min(kColumnsOfSum, valid - at.column));
}

// A warp adds up some columns of 16 rows of dK or of dV.
template <class Config>
__device__ inline void sum_parts(const typename Config::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<SumStorage<Config>*>(shared_bytes);
  static_assert(sizeof(SumStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  static_assert(Config::sum_rows == kRowsOfFragment && Config::sum_columns == kColumnsOfSum &&
                    Config::head_dim % kColumnsOfSum == 0 &&
                    Config::head_dim_v % kColumnsOfSum == 0,
                "the grid has a warp for each place");
  constexpr int of_k = Config::head_dim / kColumnsOfSum;
  constexpr int of_both = of_k + Config::head_dim_v / kColumnsOfSum;
  const Shape& shape = params.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const long long number = static_cast<long long>(blockIdx.x) * Config::warps + warp;
  const int within = static_cast<int>(number % of_both);
  SumPlace at;
  if (!find_rows<Config>(params, number / of_both, at)) return;
  StagedRows& staging = shared.staging[warp];
  if (within < of_k) {
    at.column = within * kColumnsOfSum;
    sum_place<Config, Config::head_dim>(params, at, params.dk_parts, params.dk, shape.head_dim,
                                        staging);
  } else {
    at.column = (within - of_k) * kColumnsOfSum;
    sum_place<Config, Config::head_dim_v>(params, at, params.dv_parts, params.dv, shape.head_dim_v,
                                          staging);
  }
}

}  // namespace cuflash::fa3
