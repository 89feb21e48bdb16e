// Caches: an entry's keys may lie in pages that a table names, in another entry of the caches, or
// after rows of padding.
#pragma once

#include "../ptx/prefetch.cuh"
#include "../tile/copy.cuh"
#include "../tile/panels.cuh"
#include "../tile/sequence.cuh"

namespace cuflash {

struct CachedKeysParams {
  const int* page_table;     // [batch, table_pages]; null: the page of entry i is i
  const int* cache_leftpad;  // [batch]; null: no padding
  int table_pages;           // pages of an entry; 1 without a table
  int page_size;             // rows of a page
  int page_shift;            // slot >> page_shift is the slot's page; -1: a division gives it
  int pages;                 // of all entries

  // Rows of padding before an entry's first key, at most the rows in use.
  template <class Params>
  __device__ int padding(const Params& params, int entry) const {
    if (cache_leftpad == nullptr) return 0;
    return max(0, min(cache_leftpad[entry], params.used_lengths.keys(params.shape, entry)));
  }
  // Rows of a page that one copy loads, for blocks of `block_kv` keys. The plan takes blocks that
  // are whole pages, or a part of one. Without a table the page of an entry is all its rows.
  template <int block_kv>
  __device__ int box_rows() const {
    return table_pages == 1 ? block_kv : min(page_size, block_kv);
  }
};

struct KeysInPages {
  static constexpr bool paged = true;

  // The largest number of a block's pages that are looked up before its stage is free.
  static constexpr int kAhead = 4;
  struct Found {
    int pages[kAhead];
  };
  template <class Config>
  __device__ static Found find(const typename Config::Params& params, const Sequence& seq,
                               int key) {
    const CachedKeysParams& cache = params.cached_keys;
    const int rows = cache.template box_rows<Config::block_kv>();
    Found found;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      found.pages[i] = i * rows < Config::block_kv ? place(cache, seq, key + i * rows).page : 0;
    }
    prefetch(cache, seq, key - kKeysAhead);
    return found;
  }

  // The copy engine loads a block's keys into a matrix; Matrix::bytes bytes arrive.
  template <class Matrix, class Params>
  __device__ static void load(Matrix& matrix, const void* map, unsigned barrier,
                              const Params& params, const Sequence& seq, int head, int key,
                              const Found& found) {
    const CachedKeysParams& cache = params.cached_keys;
    const int rows = cache.template box_rows<Matrix::rows>();
    const unsigned to = ptx::shared_address(matrix.data);
    const auto bring = [&](int begin, int page, int row) {
#pragma unroll
      for (int i = 0; i < Matrix::count; ++i) {
        ptx::tensor_load(to + i * Matrix::panel_bytes + begin * Matrix::row_bytes, map, barrier,
                         Matrix::first_column(i), row, head, page, ptx::kEvictLast);
      }
    };
    // Only the first page may begin after its row 0.
    bring(0, found.pages[0], place_in(cache, static_cast<int>(seq.kv_row0) + key).row);
#pragma unroll
    for (int i = 1; i < kAhead; ++i) {
      if (i * rows < Matrix::rows) bring(i * rows, found.pages[i], 0);
    }
#pragma unroll 1
    for (int begin = kAhead * rows; begin < Matrix::rows; begin += rows) {
      bring(begin, place(cache, seq, key + begin).page, 0);
    }
  }

  // All `threads` threads of a block copy a block's keys row by row, and clear the rows that are
  // not keys.
  template <class Config, int threads, class Tile>
  __device__ static void copy(const Tile& tile, const Tensor& tensor,
                              const typename Config::Params& params, const Sequence& seq, int head,
                              int key, int valid_columns) {
    using T = typename Tile::Element;
    constexpr bool by_element = Config::copies == CopyKind::element;
    constexpr int width = by_element ? 1 : Tile::chunk;
    constexpr int parts = Tile::columns / width;
    for (int i = threadIdx.x; i < Tile::rows * parts; i += threads) {
      const int row = i / parts;
      const int column = i % parts * width;
      const bool valid = key + row < seq.seqlen_kv && column < valid_columns;
      const Place at = place(params.cached_keys, seq, valid ? key + row : 0);
      const T* const from =
          tensor_row<const T>(tensor, at.page, head, at.row) + (valid ? column : 0);
      if constexpr (by_element) {
        tile.at(row, column) = valid ? *from : T(0.0f);
      } else {
        copy_chunk<Config::copies>(tile.chunk_at(row, i % parts), from, valid);
      }
    }
  }

  struct Place {
    int page;
    int row;
  };
  // The row of a key, and its page as the table names it.
  __device__ static Place look_up(const CachedKeysParams& cache, const Sequence& seq, int key) {
    return found<false>(cache, seq, key);
  }
  // The nearest page that exists.
  __device__ static int existing(const CachedKeysParams& cache, int page) {
    return max(0, min(page, cache.pages - 1));
  }

 private:
  // How many keys ahead the table is prefetched. Blocks are visited from the last to the first. The
  // pages of keys that lie this far before the block may be in a cache line of the table that has
  // not been read yet.
  static constexpr int kKeysAhead = 256;

  // The number of a slot's page among those of its entry, and the row in it.
  __device__ static Place place_in(const CachedKeysParams& cache, int slot) {
    const int number = cache.page_shift >= 0 ? slot >> cache.page_shift : slot / cache.page_size;
    return {number, slot - number * cache.page_size};
  }
  // The row of a key, and its page, moved to the nearest page that exists.
  __device__ static Place place(const CachedKeysParams& cache, const Sequence& seq, int key) {
    return found<true>(cache, seq, key);
  }
  // Looks a key up. The table is not read after the last page that has keys.
  template <bool exists>
  __device__ static Place found(const CachedKeysParams& cache, const Sequence& seq, int key) {
    const int slot0 = static_cast<int>(seq.kv_row0);
    const Place in_entry = place_in(cache, slot0 + key);
    if (cache.page_table == nullptr) return {seq.entry, in_entry.row};
    const int last = place_in(cache, slot0 + max(0, seq.seqlen_kv - 1)).page;
    const int page = line(cache, seq)[min(in_entry.page, last)];
    return {exists ? existing(cache, page) : page, in_entry.row};
  }
  __device__ static void prefetch(const CachedKeysParams& cache, const Sequence& seq, int key) {
    if (cache.table_pages > 1 && key >= 0)
      ptx::prefetch(line(cache, seq) + place_in(cache, key).page);
  }
  __device__ static const int* line(const CachedKeysParams& cache, const Sequence& seq) {
    return cache.page_table + static_cast<long long>(seq.entry) * cache.table_pages;
  }
};

// `Before` gives the number of rows in use; the last query has the position of the last of them.
template <class Before>
struct CachedLengths : Before {
  template <class Params>
  __device__ static Sequence of(const Params& params, int entry) {
    Sequence seq = Before::of(params, entry);
    const int padding = params.cached_keys.padding(params, entry);
    seq.kv_row0 = padding;
    seq.seqlen_kv -= padding;
    seq.q_last -= padding;
    seq.q_first -= padding;
    seq.rows_kv = 0x7fffffff;  // rows after a page belong to another page: every end is a tail
    return seq;
  }
};

}  // namespace cuflash
