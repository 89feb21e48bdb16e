// The tail of a block of keys: rows of the tensor that a sequence does not use, or another one's,
// which may hold anything. Scores of these keys are hidden; but where the block's rows are summed a
// weight of zero would let NaN and infinity through. So a warp clears them, between the copy
// engine's arrival and the one that readers wait for. Nothing of it is there where every row
// counts.
#pragma once

#include "../ptx/proxy_fence.cuh"
#include "panels.cuh"
#include "pipeline.cuh"
#include "sequence.cuh"

namespace cuflash {

// How many rows of a block of keys count. At least `rows` where it has no tail: where all of its
// rows count, or are beyond the array, and in a block beyond the keys, whose rows nobody sees.
template <class Config, int rows = Config::block_kv>
__device__ inline int rows_before_tail(const Sequence& seq, int kv_begin) {
  const int count = seq.seqlen_kv - kv_begin;
  const bool others = Config::Lengths::packed || seq.seqlen_kv < seq.rows_kv;
  return count > 0 && others ? count : rows;
}

// By neighbouring threads, a warp or more: zeros in the rows from `first` on, for products that
// come after these threads have met.
template <int threads, class Matrix>
__device__ inline void clear_rows(Matrix& matrix, int first) {
  auto* const chunks = reinterpret_cast<uint4*>(matrix.data);
  const int count = (Matrix::rows - first) * 8;  // of a panel
#pragma unroll 1
  for (int panel = 0; panel < Matrix::count; ++panel) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % threads; i < count; i += threads) {
      chunks[(panel * Matrix::rows + first) * 8 + i] = make_uint4(0, 0, 0, 0);
    }
  }
  ptx::fence_async_shared();
}

// Of a single matrix: where the copy engine arrives if it has a tail.
template <class Config, bool = Config::Lengths::vary>
struct TailBarrier {
  Barrier raw;
};
template <class Config>
struct TailBarrier<Config, false> {};

// Of the matrices of a ring, one at a time.
template <class Config, bool = Config::Lengths::vary>
struct TailStorage {
  Barrier raw;
  Barrier cleared;
  int stage;  // of the matrix, which arrives with it; below 0 after the last one
  int count;  // of its rows that count
};
template <class Config>
struct TailStorage<Config, false> {};

}  // namespace cuflash
