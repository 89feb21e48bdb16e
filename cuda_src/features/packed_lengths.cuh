// Packed batches: the rows of several sequences follow one another, without a batch axis. The rows
// after the last sequence form one more, whose rows do not count but are written.
// steps/list_items.cu computes where each sequence begins.
#pragma once

#include "../tile/sequence.cuh"

namespace cuflash {

struct RowsOfEntry {
  int begin;
  int count;
};
__device__ inline RowsOfEntry rows_of_entry(const int* begins, int entry) {
  return {begins[entry], begins[entry + 1] - begins[entry]};
}

// A tile of a sequence, and the sequence's rows. The `entry` of a list's first item is the number
// of items that follow. A list of kv tiles continues after these with entries below 0.
struct PackedItem {
  int entry;
  int tile;
  RowsOfEntry queries;
  RowsOfEntry keys;
};

struct PackedLengthsParams {
  const int* q_begins;  // [entries + 2], see steps/list_items.cu
  const int* kv_begins;
  const PackedItem* q_items;
  const PackedItem* kv_items;
  int entries;
  int bottom_right;  // whether a sequence's last query is at its last key

  __device__ RowsOfEntry queries(int entry) const { return rows_of_entry(q_begins, entry); }
  __device__ RowsOfEntry keys(int entry) const { return rows_of_entry(kv_begins, entry); }
  // The difference, in keys, between the position of query 0 of an entry and that of the array.
  __device__ int shift(const Shape& shape, int entry) const {
    return shift(shape, queries(entry), keys(entry));
  }
  __device__ int shift(const Shape& shape, const RowsOfEntry& queries,
                       const RowsOfEntry& keys) const {
    if (bottom_right == 0) return 0;
    return (keys.count - shape.seqlen_kv) - (queries.count - shape.seqlen_q);
  }

  // Every sequence begins at a multiple of this many rows of a head's workspace. work_row() leaves
  // room for the sequences before it, each rounded up, whatever their lengths are. The plan counts
  // the rows in the same way.
  static constexpr int kAlignment = 128;
  __device__ static int work_row(int begin, int entry) {
    return (begin + entry * (kAlignment - 1)) / kAlignment * kAlignment;
  }
  // The sequence of a row of a head's workspace.
  __device__ int entry_of_row(int row) const {
    int first = 0;
    int last = entries;
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (work_row(q_begins[middle], middle) <= row) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
};

// `Before` gives the bounds of the keys for arrays of one sequence.
template <class Before>
struct PackedLengths {
  static constexpr bool vary = true;
  static constexpr bool packed = true;
  static constexpr bool one_position = false;
  static constexpr int alignment = PackedLengthsParams::kAlignment;
  template <class Params>
  __device__ static const PackedItem* q_items(const Params& params) {
    return params.packed_lengths.q_items;
  }
  template <class Params>
  __device__ static Sequence of(const Params& params, int entry) {
    const PackedLengthsParams& packed = params.packed_lengths;
    return of_item(params, {entry, 0, packed.queries(entry), packed.keys(entry)});
  }
  template <class Params>
  __device__ static Sequence of_item(const Params& params, const PackedItem& item) {
    const PackedLengthsParams& packed = params.packed_lengths;
    const auto& [entry, tile, queries, keys] = item;
    Sequence seq = Before::of(params, 0);
    seq.entry = entry;
    seq.q_row0 = queries.begin;
    seq.kv_row0 = keys.begin;
    seq.rows_q = queries.count;
    seq.rows_kv = keys.count;
    seq.seqlen_q = entry < packed.entries ? queries.count : 0;
    seq.seqlen_kv = entry < packed.entries ? keys.count : 0;
    const int shift = packed.shift(params.shape, queries, keys);
    seq.q_last += shift;
    seq.q_first += shift;
    seq.work_row0 = packed.work_row(queries.begin, entry);
    return seq;
  }
};

}  // namespace cuflash
