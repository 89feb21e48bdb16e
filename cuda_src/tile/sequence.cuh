// The rows of a batch entry: where they are, how many there are, and which keys its first query may
// see. Config::Lengths reads them from the parameters of the launch.
#pragma once

#include "../params.cuh"

namespace cuflash {

struct Sequence {
  int entry;     // the batch entry; in a packed batch the number of the sequence
  int batch;     // index into the tensors: 0 where sequences are packed
  int seqlen_q;  // rows that count
  int seqlen_kv;
  int rows_q;  // all rows, also those that do not count; those are written too
  int rows_kv;
  int q_last;        // the last key that query 0 sees, where the mask has a last key
  int q_first;       // the first key that query 0 sees, where the mask has a first key
  long long q_row0;  // the sequence's first row in the tensors of queries
  long long kv_row0;
  long long work_row0;  // the sequence's first row among a head's in a workspace of padded rows
};

// Every batch entry has the lengths of the shape.
struct FixedLengths {
  static constexpr bool vary = false;          // whether some rows do not count
  static constexpr bool packed = false;        // whether one sequence's rows follow another's
  static constexpr bool one_position = false;  // whether all rows have the first one's position
  template <class Params>
  __device__ static Sequence of(const Params& params, int batch) {
    const Shape& shape = params.shape;
    return {batch,          batch,           shape.seqlen_q, shape.seqlen_kv,
            shape.seqlen_q, shape.seqlen_kv, shape.q_offset};
  }
};

// The rows of keys lie one after the other.
struct KeysInRows {
  static constexpr bool paged = false;
  struct Found {};
  template <class Config>
  __device__ static Found find(const typename Config::Params&, const Sequence&, int) {
    return {};
  }
};

template <class Config>
__device__ inline Sequence sequence(const typename Config::Params& params, int batch) {
  return Config::Lengths::of(params, batch);
}

// The number of rows of padding before an entry's keys.
template <class Params>
__device__ inline auto padding_of(const Params& params, int entry, int)
    -> decltype(params.cached_keys.padding(params, entry)) {
  return params.cached_keys.padding(params, entry);
}
template <class Params>
__device__ inline int padding_of(const Params&, int, long) {
  return 0;
}

// The difference, in keys, between the position of query 0 of an entry of packed queries and that
// of query 0 of the array.
template <class Params>
__device__ inline auto shift_of_packed(const Params& params, int entry, int)
    -> decltype(params.packed_queries.shift(params.shape, params.packed_queries.queries(entry))) {
  return params.packed_queries.shift(params.shape, params.packed_queries.queries(entry));
}
template <class Params>
__device__ inline int shift_of_packed(const Params&, int, long) {
  return 0;
}

// The difference, in keys, between the position of an entry's query 0 and that of the shape.
template <class Params>
__device__ inline auto shift_of(const Params& params, int batch, int)
    -> decltype(params.used_lengths.shift(params.shape, batch)) {
  return params.used_lengths.shift(params.shape, batch) - padding_of(params, batch, 0) +
         shift_of_packed(params, batch, 0);
}
template <class Params>
__device__ inline auto shift_of(const Params& params, int entry, int)
    -> decltype(params.packed_lengths.shift(params.shape, entry)) {
  return params.packed_lengths.shift(params.shape, entry);
}
template <class Params>
__device__ inline int shift_of(const Params&, int, long) {  // where every row counts
  return 0;
}

// Whether a row lies in the array but beyond its sequence: it sees no key, and no end of rows
// changes it.
template <class Config>
__device__ inline bool is_surplus(const Sequence& seq, int row) {
  return Config::Lengths::vary && row >= seq.seqlen_q;
}

// The most tiles of `rows` rows that `sequences` sequences of total length `length` may have: each
// sequence may end in the middle of a tile.
__device__ inline int most_tiles(int length, int sequences, int rows) {
  return (length + sequences * (rows - 1)) / rows;
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
  return (static_cast<long long>(seq.batch) * shape.heads_q + head) * shape.seqlen_q + seq.q_row0 +
         row;
}

// The same where a head has `padded_rows` rows and every sequence begins at a whole tile.
__device__ inline long long padded_row(const Shape& shape, const Sequence& seq, int head,
                                       long long padded_rows) {
  return (static_cast<long long>(seq.batch) * shape.heads_q + head) * padded_rows + seq.work_row0;
}

// The sequence of a padded row of a head, the row's number in it, and the number of its rows.
template <class Config>
__device__ inline Sequence sequence_of_row(const typename Config::Params& params, int batch,
                                           int row) {
  if constexpr (Config::Lengths::packed) {
    static_assert(Config::rows == Config::Lengths::alignment, "a block has rows of one sequence");
    return sequence<Config>(params, params.packed_lengths.entry_of_row(row));
  } else {
    return sequence<Config>(params, batch);
  }
}
template <class Config>
__device__ inline int row_of_sequence(const Sequence& seq, int row) {
  return Config::Lengths::packed ? row - static_cast<int>(seq.work_row0) : row;
}
template <class Config>
__device__ inline int rows_there(const Shape& shape, const Sequence& seq) {
  return Config::Lengths::packed ? seq.rows_q : shape.seqlen_q;
}

// The number of batch entries, or of sequences; the rows after the last sequence count as one.
template <class Config>
__device__ inline int entries_of(const typename Config::Params& params) {
  if constexpr (Config::Lengths::packed) {
    return params.packed_lengths.entries + 1;
  } else {
    return params.shape.batch;
  }
}

}  // namespace cuflash
