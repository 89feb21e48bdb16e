// What steps/append_kv.cu is launched with, and where it finds the slot of a token.
#pragma once

#include "../params.cuh"

namespace cuflash {

// `Shape` counts new tokens as keys, and as queries those that are rotated, 0 where none are.
struct AppendKvParams {
  Tensor k;  // of the new tokens
  Tensor v;
  Tensor k_cache;  // [entry, slot, head, column], or [page, slot of the page, head, column]
  Tensor v_cache;
  Tensor q;
  Tensor q_rotated;
  const int* cache_seqlens;    // [batch]; before the new tokens
  const int* page_table;       // [batch, pages of an entry]; null of caches without pages
  const int* cache_batch_idx;  // [batch]; null: an entry of the batch is that of the cache
  const int* rotary_seqlens;   // [batch]; null: positions are slots
  const void* rotary_cos;      // [rotary_rows, rotary_pairs]; may be empty
  const void* rotary_sin;
  int* overflow;       // [batch]; null: nobody asks
  int* lengths_after;  // [batch]; null: nobody asks
  long long table_stride;
  long long capacity;   // slots of an entry
  long long page_size;  // 0 of caches without pages
  long long entries;    // of the cache, or its pages
  long long rotates;    // whether keys turn; a table of no elements has no address
  long long rotary_rows;
  long long rotary_pairs;
  long long rotary_interleaved;  // pairs are neighbours, else half of all pairs' columns apart
  long long queries_advance;     // the position of a query is that of the one before it plus 1
  Shape shape;
};

namespace steps {

// A row of new tokens or of queries: its entry and number there, and its place in the array.
struct RowOfAll {
  int entry;
  int row;
  int head;
  int batch;
  int place;
};

// Rows of an array lie by entries.
template <class Params>
__device__ inline RowOfAll row_of_all(const Params&, long long number, int rows, int heads, long) {
  const long long all_rows = number / heads;
  const int entry = static_cast<int>(all_rows / rows), row = static_cast<int>(all_rows % rows);
  return {entry, row, static_cast<int>(number % heads), entry, row};
}
// They are packed. One that is of no entry is counted to the first, where it has no slot.
template <class Params>
__device__ inline auto row_of_all(const Params& params, long long number, int, int heads, int)
    -> decltype(params.packed_tokens.entry_of_row(params.shape, 0), RowOfAll()) {
  const Shape& shape = params.shape;
  const int place = static_cast<int>(number / heads), head = static_cast<int>(number % heads);
  const int entry = params.packed_tokens.entry_of_row(shape, place);
  if (entry == shape.batch) return {0, 0x7fffffff, head, 0, place};
  return {entry, place - params.packed_tokens.begin(shape, entry), head, 0, place};
}

// New tokens of an entry, whether there is room for them or not.
template <class Params>
__device__ inline int new_tokens(const Params& params, int, long) {
  return params.shape.seqlen_kv;
}
template <class Params>
__device__ inline auto new_tokens(const Params& params, int entry, int)
    -> decltype(params.packed_tokens.count(params.shape, entry)) {
  return params.packed_tokens.count(params.shape, entry);
}

// Rows of heads of all entries, `rows` of each where they lie by entries.
template <class Params>
__device__ inline long long rows_of_heads(const Params& params, int rows, int heads, long) {
  return static_cast<long long>(params.shape.batch) * rows * heads;
}
template <class Params>
__device__ inline auto rows_of_heads(const Params& params, int rows, int heads, int)
    -> decltype(params.packed_tokens.count(params.shape, 0), 0ll) {
  return static_cast<long long>(rows) * heads;
}

// Where a token goes: `entry` is below 0 of one that fits nowhere.
struct Slot {
  long long entry;
  long long row;
};

// The length of an entry before the new tokens: whatever is given, slots are those of the cache.
template <class Params>
__device__ inline long long length_before(const Params& params, int entry) {
  const long long length = params.cache_seqlens[entry];
  return length < 0 ? 0 : length < params.capacity ? length : params.capacity;
}

// Where the rotation of an entry's first new token and first query begins.
template <class Params>
__device__ inline long long first_position(const Params& params, int entry) {
  if (params.rotary_seqlens != nullptr) return params.rotary_seqlens[entry];
  return length_before(params, entry);
}

// New tokens of an entry that have a slot, and angles where keys are rotated: the first ones.
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

// The entry of the cache, or the page, that a page of an entry of the batch is; below 0 if there is
// none. It is asked for pages that new tokens stand in alone: what the table says of others, and
// behind the last, is never looked at.
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
