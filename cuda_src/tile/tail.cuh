// The tail of a block of keys: rows of the tensor that a sequence does not use, or that belong to
// another sequence, and that may hold anything. Scores of these keys are hidden, but zero weights
// times NaN or infinity would make a sum over the block's rows NaN. A warp therefore clears the
// tail after the copy engine has written it and before other warps read it. Kernels whose lengths
// do not vary have none of this.
#pragma once

#include "../ptx/proxy_fence.cuh"
#include "panels.cuh"
#include "pipeline.cuh"
#include "sequence.cuh"

namespace cuflash {

// The number of rows of a block of keys before its tail. It is at least `rows` if the block has no
// tail. A block has no tail if the rows after the keys lie beyond the array, or if the whole block
// lies beyond the keys: no query sees its rows.
template <class Config, int rows = Config::block_kv>
__device__ inline int rows_before_tail(const Sequence& seq, int kv_begin) {
  const int count = seq.seqlen_kv - kv_begin;
  const bool others = Config::Lengths::packed || seq.seqlen_kv < seq.rows_kv;
  return count > 0 && others ? count : rows;
}

// `threads` neighbouring threads, a warp or more, clear the rows from `first` on. Products may read
// them after a barrier of these threads.
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

// The barrier of a single matrix: the copy engine arrives here if the matrix has a tail.
template <class Config, bool = Config::Lengths::vary>
struct TailBarrier {
  Barrier raw;
};
template <class Config>
struct TailBarrier<Config, false> {};

// The tail of one matrix of a ring at a time, and its barriers.
template <class Config, bool = Config::Lengths::vary>
struct TailStorage {
  Barrier raw;
  Barrier cleared;
  int stage;  // stage of the matrix that arrives; negative after the last one
  int count;  // rows before its tail
};
template <class Config>
struct TailStorage<Config, false> {};

}  // namespace cuflash
