// Packed tokens: the new tokens of an append, and the queries beside them, are rows of arrays
// without a batch axis. Rows after the last offset belong to no entry.
#pragma once

#include "../params.cuh"

namespace cuflash {

struct PackedTokensParams {
  const int* cu_seqlens_q;  // [batch + 1]; with any values rows stay inside the arrays

  // An entry's first row; the first entry begins at row 0.
  __device__ int begin(const Shape& shape, int entry) const {
    return entry == 0 ? 0 : max(0, min(cu_seqlens_q[entry], shape.seqlen_kv));
  }
  __device__ int count(const Shape& shape, int entry) const {
    return max(0, begin(shape, entry + 1) - begin(shape, entry));
  }
  // The entry of a row, or `batch` for a row after the last offset.
  __device__ int entry_of_row(const Shape& shape, int row) const {
    int first = 0;
    int last = shape.batch;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (begin(shape, middle) <= row) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
};

}  // namespace cuflash
