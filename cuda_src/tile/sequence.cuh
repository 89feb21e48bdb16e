// Where a batch entry's rows are and how long it is. Every kernel asks here and nowhere else, so
// that lengths and offsets may one day come from device memory instead of the parameters.
#pragma once

#include "../params.cuh"

namespace cuflash {

struct Sequence {
  int batch;
  int seqlen_q;
  int seqlen_kv;
  int q_offset;      // position of query 0 among the keys
  long long q_row0;  // of the tensors' rows, the sequence's first
  long long kv_row0;
};

__device__ inline Sequence sequence(const Shape& shape, int batch) {
  return {batch, shape.seqlen_q, shape.seqlen_kv, shape.q_offset, 0, 0};
}

template <class T>
__device__ inline T* tensor_row(const Tensor& tensor, int batch, int head, long long row) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
         row * tensor.row_stride;
}

// The first element of a row of a tensor of queries (q, out, dout, dq) or of keys (k, v, dk, dv).
template <class T>
__device__ inline T* q_row(const Tensor& tensor, const Sequence& seq, int head, long long row) {
  return tensor_row<T>(tensor, seq.batch, head, seq.q_row0 + row);
}
template <class T>
__device__ inline T* kv_row(const Tensor& tensor, const Sequence& seq, int head, long long row) {
  return tensor_row<T>(tensor, seq.batch, head, seq.kv_row0 + row);
}
template <class T>
__device__ inline T* row_number(const RowVector& vector, const Sequence& seq, int head,
                                long long row) {
  return static_cast<T*>(vector.data) + seq.batch * vector.batch_stride +
         head * vector.head_stride + (seq.q_row0 + row) * vector.row_stride;
}

// Row index in a workspace that is contiguous over [batch, heads_q, seqlen_q].
__device__ inline long long workspace_row(const Shape& shape, const Sequence& seq, int head,
                                          long long row) {
  return (static_cast<long long>(seq.batch) * shape.heads_q + head) * shape.seqlen_q + row;
}

}  // namespace cuflash
