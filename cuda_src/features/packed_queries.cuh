// Packed queries on caches: the queries of several entries follow one another in an array without a
// batch axis, and each entry has its own keys. As in packed_lengths.cuh, the rows after those of
// the last entry form one more sequence, whose rows do not count but are written.
#pragma once

#include "packed_lengths.cuh"

namespace cuflash {

struct PackedQueriesParams {
  const int* q_begins;  // [entries + 2], see steps/list_items.cu
  const PackedItem* q_items;
  long long entries;

  __device__ RowsOfEntry queries(int entry) const { return rows_of_entry(q_begins, entry); }
  // The difference, in keys, between the position of query 0 and its position if all rows of the
  // array belonged to its entry.
  __device__ int shift(const Shape& shape, const RowsOfEntry& queries) const {
    return shape.seqlen_q - queries.count;
  }
  // The sequence of a row of the array. If several begin there, all but the last one are empty.
  __device__ int entry_of_row(int row) const {
    int first = 0;
    int last = static_cast<int>(entries);
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (q_begins[middle] <= row) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
};

// `Before` gives the keys of an entry, and the position of query 0 if the last row of the array is
// at the last key.
template <class Before>
struct PackedQueries {
  static constexpr bool vary = true;
  static constexpr bool packed = true;
  static constexpr bool one_position = false;

  template <class Params>
  __device__ static const PackedItem* q_items(const Params& params) {
    return params.packed_queries.q_items;
  }
  template <class Params>
  __device__ static Sequence of(const Params& params, int entry) {
    return of_item(params, {entry, 0, params.packed_queries.queries(entry)});
  }
  // Rows after those of the last entry read its keys, so that no array is read past its end.
  template <class Params>
  __device__ static Sequence of_item(const Params& params, const PackedItem& item) {
    const PackedQueriesParams& packed = params.packed_queries;
    const int entries = static_cast<int>(packed.entries);
    Sequence seq = Before::of(params, min(item.entry, entries - 1));
    seq.batch = 0;
    seq.q_row0 = item.queries.begin;
    seq.rows_q = item.queries.count;
    seq.seqlen_q = item.entry < entries ? item.queries.count : 0;
    const int shift = packed.shift(params.shape, item.queries);
    seq.q_last += shift;
    seq.q_first += shift;
    return seq;
  }
  // The sequence that a row of the array belongs to.
  template <class Params>
  __device__ static Sequence of_row(const Params& params, int row) {
    return of(params, params.packed_queries.entry_of_row(row));
  }
};

}  // namespace cuflash
