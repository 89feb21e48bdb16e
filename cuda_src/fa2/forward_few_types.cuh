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
  static constexpr int rows = Config::rows;
  static constexpr int fragments = rows / 16;
  static constexpr int steps = Config::head_dim / 16;        // of the products with K
  static constexpr int out_stride = Config::head_dim_v + 8;  // numbers between rows of results
  static_assert(rows % 16 == 0 && Config::mma_depth == 16, "whole fragments of rows");
  static_assert(Config::packs_heads || rows == Config::block_q, "a row for each query");
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
  // Q as left operands: four registers of each lane for each step of a fragment.
  SharedArray<unsigned, FewTypes<Config>::fragments * FewTypes<Config>::steps * 32 * 4> q;
  // The reference and the sum of every row of every warp.
  SharedArray<Pair<float>, Config::warps * FewTypes<Config>::rows> ends;
};

// The rows of a block: queries of a q tile and, where Config::packs_heads, query heads of one kv
// head, so that its keys are read once. Row r then has query r / heads and head r % heads; blocks
// that differ in `part` have different queries of the tile.
template <class Config, bool = Config::packs_heads>
struct FewRows {
  const int query0;
  const int head0;
  const int count;  // those that are stored

  template <class Params>
  __device__ FewRows(const Params&, const WorkItem& item, const Sequence& seq, int)
      : query0(item.q_tile * Config::block_q),
        head0(item.head),
        count(min(Config::block_q, seq.rows_q - query0)) {}
  __device__ int query(int row) const { return query0 + row; }
  __device__ int head(int) const { return head0; }
};
template <class Config>
struct FewRows<Config, true> {
  const int heads;
  const int query0;
  const int head0;
  const int count;

  template <class Params>
  __device__ FewRows(const Params& params, const WorkItem& item, const Sequence& seq, int part)
      : heads(static_cast<int>(params.heads_of_block)),
        query0(item.q_tile * Config::block_q + part * (Config::rows / heads)),
        head0(item.head * heads),
        count(queries_here(item, seq) * heads) {}
  __device__ int query(int row) const { return query0 + row / heads; }
  __device__ int head(int row) const { return head0 + row % heads; }

 private:
  // May be negative: the q tile, or the sequence, may end before this part of it.
  __device__ int queries_here(const WorkItem& item, const Sequence& seq) const {
    const int end = min((item.q_tile + 1) * Config::block_q, seq.rows_q);
    return min(Config::rows / heads, end - query0);
  }
};

// What all steps of a block have in common.
template <class Config>
struct FewContext {
  const typename Config::Params& params;
  FewStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const KvRange range;  // tiles of block_kv keys
  const FewRows<Config> rows;
  const int kv_head;

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // The warp's first tile. A tile belongs to the same warp in every call.
  __device__ int first_tile() const {
    const int before = range.begin % Config::warps;
    return range.begin + (warp() - before + Config::warps) % Config::warps;
  }
};

// The rows of a warp from step to step.
template <class Config>
struct FewState {
  typename FewTypes<Config>::Output output;   // not yet divided by the row's sum
  typename FewTypes<Config>::Rows reference;  // subtracted from the row's logits
  typename FewTypes<Config>::Rows sum;        // of the weights, over this lane's columns
};

}  // namespace cuflash::fa2
