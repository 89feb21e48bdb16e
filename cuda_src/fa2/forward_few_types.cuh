// FlashAttention-2 forward for few queries: the tiles of a warp, and what a block keeps in shared
// memory.
#pragma once

#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/shared_tile.cuh"
#include "../tile/softmax.cuh"
#include "../tile/stored.cuh"
#include "forward_few_params.cuh"

namespace cuflash::fa2 {

// A tile of keys or values as the caches store them.
template <class Cell, int rows, int columns>
struct CachedTile : SharedTile<Cell, rows, columns> {};

// A tile of bytes. If a row is a line of 128 bytes, the same four chunks of two neighbouring rows
// lie in different halves of the line, so that eight lanes read them without a bank conflict.
template <int rows, int columns>
struct CachedTile<unsigned char, rows, columns> : SharedTile<unsigned char, rows, columns> {
  using Plain = SharedTile<unsigned char, rows, columns>;
  __device__ unsigned char* chunk_at(int row, int chunk_index) const {
    if constexpr (Plain::group < 8) return Plain::chunk_at(row, chunk_index);
    const int permuted = chunk_index ^ (row / 2 % 4 + row % 2 * 4);
    return this->data + (row * Plain::chunks + permuted) * Plain::chunk;
  }
};

template <class Config>
struct FewTypes {
  using Storage = typename Config::Storage;
  using Cell = typename Config::Stored::template Cell<Storage>;
  static constexpr int rows = Config::block_q;
  static constexpr int steps = Config::head_dim / 16;        // of the products with K
  static constexpr int out_stride = Config::head_dim_v + 8;  // numbers between rows of results
  static_assert(rows == 16 && Config::mma_depth == 16, "one fragment of rows");
  static_assert(Config::block_kv % 16 == 0, "the keys are whole instructions");
  static_assert(Config::copies == CopyKind::asynchronous, "a ring of asynchronous copies");
  static_assert(!natural_logits<Config>, "16-bit storage");

  using Scores = WarpTile<float, 16, rows, Config::block_kv>;
  using Output = WarpTile<float, 16, rows, Config::head_dim_v>;
  using Rows = RowValues<Scores>;
  using KTile = CachedTile<Cell, Config::block_kv, Config::head_dim>;
  using VTile = CachedTile<Cell, Config::block_kv, Config::head_dim_v>;
};

// A warp's ring of slots, which hold keys and values by turns.
template <class Config>
struct FewRing {
  using Cell = typename FewTypes<Config>::Cell;
  static constexpr int widest =
      Config::head_dim > Config::head_dim_v ? Config::head_dim : Config::head_dim_v;
  SharedArray<Cell, Config::block_kv * widest> slots[Config::num_slots];
};

// The results of the warps: [warps][result_rows, out_stride]. Without chunks each warp's result
// lies where its ring was.
template <class Config, bool = Config::merges_chunks>
struct FewResults {
  FewRing<Config> rings[Config::warps];
  static_assert(sizeof(FewRing<Config>) >=
                    sizeof(float) * Config::result_rows * FewTypes<Config>::out_stride,
                "the result of a warp fits in its ring");
  __device__ float* of(int warp) { return reinterpret_cast<float*>(rings[warp].slots); }
};
// With chunks, results have memory of their own, because copies for the next chunk already write to
// the rings. `merged` and `ends_of_merged` hold the rows of all chunks so far. Chunks write to the
// two arrays of `ends_of_merged` alternately, because several threads read the old ends of a row.
template <class Config>
struct FewResults<Config, true> {
  static constexpr int numbers = Config::result_rows * FewTypes<Config>::out_stride;
  FewRing<Config> rings[Config::warps];
  SharedArray<float, Config::warps * numbers> results;
  SharedArray<float, Config::result_rows * Config::head_dim_v> merged;
  SharedArray<Pair<float>, Config::result_rows> ends_of_merged[2];
  __device__ float* of(int warp) { return results.data + warp * numbers; }
};

template <class Config>
struct FewStorage : FewResults<Config> {
  // Q as left operands: four registers of each lane for each step.
  SharedArray<unsigned, FewTypes<Config>::steps * 32 * 4> q;
  // The reference and the sum of every row of every warp.
  SharedArray<Pair<float>, Config::warps * FewTypes<Config>::rows> ends;
};

// What all steps of a block have in common.
template <class Config>
struct FewContext {
  const typename Config::Params& params;
  FewStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const KvRange range;  // tiles of block_kv keys
  const int kv_head;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // The warp's first tile. A tile belongs to the same warp in every call.
  __device__ int first_tile() const {
    const int before = range.begin % Config::warps;
    return range.begin + (warp() - before + Config::warps) % Config::warps;
  }
  __device__ int first_query() const { return item.q_tile * Config::block_q; }
  __device__ int rows() const { return min(Config::block_q, seq.rows_q - first_query()); }
};

// The rows of a warp from step to step.
template <class Config>
struct FewState {
  typename FewTypes<Config>::Output output;   // not yet divided by the row's sum
  typename FewTypes<Config>::Rows reference;  // subtracted from the row's logits
  typename FewTypes<Config>::Rows sum;        // of the weights, over this lane's columns
};

}  // namespace cuflash::fa2
