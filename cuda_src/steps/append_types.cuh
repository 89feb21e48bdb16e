// The parameters of steps/append_kv.cu, and the slot of a token.
#pragma once

#include "../params.cuh"

namespace cuflash {

// In `shape`, keys are the new tokens and queries are those that are rotated, none if seqlen_q is
// 0.
struct AppendKvParams {
  Tensor k;  // of the new tokens
  Tensor v;
  Tensor k_cache;  // [entry, slot, head, column], or [page, slot of the page, head, column]
  Tensor v_cache;
  Tensor q;
  Tensor q_rotated;
  const int* cache_seqlens;    // [batch]; before the new tokens
  const int* page_table;       // [batch, pages of an entry]; null: caches without pages
  const int* cache_batch_idx;  // [batch]; null: entry i of the batch is entry i of the cache
  const int* rotary_seqlens;   // [batch]; null: positions are slots
  const void* rotary_cos;      // [rotary_rows, rotary_pairs]; may be empty
  const void* rotary_sin;
  int* overflow;       // [batch]; null: not wanted
  int* lengths_after;  // [batch]; null: not wanted
  long long table_stride;
  long long capacity;   // slots of an entry
  long long page_size;  // 0: caches without pages
  long long entries;    // of the cache, or its pages
  long long rotates;    // whether keys are rotated; the tables do not tell: empty ones are null
  long long rotary_rows;
  long long rotary_pairs;
  long long rotary_interleaved;  // a pair is columns 2 i and 2 i + 1, else i and i + rotary_pairs
  long long queries_advance;     // each query's position is one more than the query's before it
  Shape shape;
};

namespace steps {

// A row of new tokens or of queries: its entry, its number in the entry, its head, and its batch
// index and row in the array.
struct RowOfAll {
  int entry;
  int row;
  int head;
  int batch;
  int place;
};

// The rows of an array are ordered by entries.
template <class Params>
__device__ inline RowOfAll row_of_all(const Params&, long long number, int rows, int heads, long) {
  const long long all_rows = number / heads;
  const int entry = static_cast<int>(all_rows / rows), row = static_cast<int>(all_rows % rows);
  return {entry, row, static_cast<int>(number % heads), entry, row};
}
// The rows are packed. A row that belongs to no entry gets the first entry, and a number that has
// no slot there.
template <class Params>
__device__ inline auto row_of_all(const Params& params, long long number, int, int heads, int)
    -> decltype(params.packed_tokens.entry_of_row(params.shape, 0), RowOfAll()) {
  const Shape& shape = params.shape;
  const int place = static_cast<int>(number / heads), head = static_cast<int>(number % heads);
  const int entry = params.packed_tokens.entry_of_row(shape, place);
  if (entry == shape.batch) return {0, 0x7fffffff, head, 0, place};
  return {entry, place - params.packed_tokens.begin(shape, entry), head, 0, place};
}

// The number of new tokens of an entry, whether there is room for them or not.
template <class Params>
__device__ inline int new_tokens(const Params& params, int, long) {
  return params.shape.seqlen_kv;
}
template <class Params>
__device__ inline auto new_tokens(const Params& params, int entry, int)
    -> decltype(params.packed_tokens.count(params.shape, entry)) {
  return params.packed_tokens.count(params.shape, entry);
}

// The number of rows of all heads and entries. `rows` is that of one entry, or, if rows are packed,
// of all.
template <class Params>
__device__ inline long long rows_of_heads(const Params& params, int rows, int heads, long) {
  return static_cast<long long>(params.shape.batch) * rows * heads;
}
template <class Params>
__device__ inline auto rows_of_heads(const Params& params, int rows, int heads, int)
    -> decltype(params.packed_tokens.count(params.shape, 0), 0ll) {
  return static_cast<long long>(rows) * heads;
}

// Where a token is stored; `entry` is negative if it fits nowhere.
struct Slot {
  long long entry;
  long long row;
};

// The length of an entry before the new tokens, clamped to the slots of the cache.
template <class Params>
__device__ inline long long length_before(const Params& params, int entry) {
  const long long length = params.cache_seqlens[entry];
  return length < 0 ? 0 : length < params.capacity ? length : params.capacity;
}

// The position by which an entry's first new token and first query are rotated.
template <class Params>
__device__ inline long long first_position(const Params& params, int entry) {
  if (params.rotary_seqlens != nullptr) return params.rotary_seqlens[entry];
  return length_before(params, entry);
}

// The number of an entry's new tokens, counted from the first, that have a slot and, where keys are
// rotated, angles.
template <class Params>
__device__ inline long long tokens_with_slots(const Params& params, int entry) {
  long long room = params.capacity - length_before(params, entry);
  if (params.rotates != 0) {
    const long long first = first_position(params, entry);
    const long long angles = first < 0 ? 0 : params.rotary_rows - first;
    room = angles < room ? angles : room;
  }
  const long long tokens = new_tokens(params, entry, 0);
  return room < 0 ? 0 : room < tokens ? room : tokens;
}

// The page of the cache that is page `page` of an entry of the batch, or the entry of a cache
// without pages; negative if there is none. Only pages that receive new tokens are looked up, so
// other elements of the table may hold anything.
template <class Params>
__device__ inline long long entry_of_cache(const Params& params, int entry, long long page) {
  long long found = entry;
  if (params.page_table != nullptr) {
    found = params.page_table[entry * params.table_stride + page];
  } else if (params.cache_batch_idx != nullptr) {
    found = params.cache_batch_idx[entry];
  }
  return found < params.entries ? found : -1;
}

template <class Params>
__device__ inline Slot slot_of(const Params& params, int entry, long long token) {
  if (token >= tokens_with_slots(params, entry)) return {-1, 0};
  const long long slot = length_before(params, entry) + token;
  const long long page = params.page_table == nullptr ? 0 : slot / params.page_size;
  return {entry_of_cache(params, entry, page), slot - page * params.page_size};
}

}  // namespace steps
}  // namespace cuflash
