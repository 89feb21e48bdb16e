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
  const void* rotary_cos;      // [rotary_rows, rotary_pairs]; null: nothing is rotated
  const void* rotary_sin;
  int* overflow;       // [batch]; null: nobody asks
  int* lengths_after;  // [batch]; null: nobody asks
  long long table_stride;
  long long capacity;   // slots of an entry
  long long page_size;  // 0 of caches without pages
  long long entries;    // of the cache, or its pages
  long long rotary_rows;
  long long rotary_pairs;
  long long rotary_interleaved;  // pairs are neighbours, else half of all pairs' columns apart
  long long queries_advance;     // the position of a query is that of the one before it plus 1
  Shape shape;
};

namespace steps {

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

// Of a page that a new token stands in alone the table is read: what it says of others, and behind
// the last, is never looked at.
template <class Params>
__device__ inline Slot slot_of(const Params& params, int entry, long long token) {
  constexpr Slot none = {-1, 0};
  const long long slot = length_before(params, entry) + token;
  if (slot >= params.capacity) return none;
  if (params.rotary_cos != nullptr) {
    const long long first = first_position(params, entry);
    if (first < 0 || first + token >= params.rotary_rows) return none;
  }
  Slot found = {entry, slot};
  if (params.page_table != nullptr) {
    const long long page = slot / params.page_size;
    found = {params.page_table[entry * params.table_stride + page], slot - page * params.page_size};
  } else if (params.cache_batch_idx != nullptr) {
    found.entry = params.cache_batch_idx[entry];
  }
  return 0 <= found.entry && found.entry < params.entries ? found : none;
}

}  // namespace steps
}  // namespace cuflash
