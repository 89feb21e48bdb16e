// An array that broadcasts against all pairs, which terms of the scores read directly from memory.
#pragma once

#include "../tile/score.cuh"

namespace cuflash {

// The array's entry for an entry of the batch: neighbouring batch entries share one.
template <class Block>
__device__ inline int own_entry(const Block& block, int batch) {
  return batch / block.entries % block.own_entries;
}

// The array's element for a lane's first query and key, and steps from there. `of_rows`, `of_keys`:
// whether the array differs from query to query, and from key to key.
template <class T, bool of_rows, bool of_keys>
struct LanePairs {
  const char* first;
  long long row_stride;  // in bytes
  long long column_stride;
  int rows_left;  // from the lane's first query to the last one
  int keys_left;

  // Strides in elements, 0 along an axis that the array broadcasts.
  template <class Block>
  __device__ LanePairs(const Block& block, const void* data, long long batch_stride,
                       long long head_stride, long long row_stride, long long column_stride,
                       const Shape& shape, const Lane& lane)
      : row_stride(row_stride * sizeof(T)),
        column_stride(column_stride * sizeof(T)),
        rows_left(shape.seqlen_q - 1 - lane.i),
        keys_left(shape.seqlen_kv - 1 - lane.j) {
    const int entry = own_entry(block, lane.batch);
    first = reinterpret_cast<const char*>(static_cast<const T*>(data) + entry * batch_stride +
                                          lane.head * head_stride);
    if constexpr (of_rows) first += lane.i * this->row_stride;
    if constexpr (of_keys) first += lane.j * this->column_stride;
  }

  // Elements beyond the lengths are hidden later; the last element takes their place.
  __device__ T at(int di, int dj) const {
    const char* from = first;
    if constexpr (of_rows) from += min(di, rows_left) * row_stride;
    if constexpr (of_keys) from += min(dj, keys_left) * column_stride;
    return *reinterpret_cast<const T*>(from);
  }
};

}  // namespace cuflash
