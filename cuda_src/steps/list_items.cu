// Lists where packed sequences begin, and their tiles. Tiles with long loops come first: blocks
// draw tiles in this order, so the last tiles to end are short ones. One block does all of this;
// the tiles of a sequence stay together and in order.
//
// Sequences are sorted into classes by the length of their loops, two classes for each power of
// two. The order within a class does not affect the results.
#include "../features/packed_lengths.cuh"
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"

namespace cuflash::steps {

constexpr int kClasses = 64;

template <int warps>
struct ListStorage {
  int first[kClasses];  // the next item of each class
  int end;              // of all items
  int of_warp[warps];   // the largest offset that each warp holds
};

// The largest x of this lane and the lanes before it.
__device__ inline int largest_so_far(int x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x = max(x, before);
  }
  return x;
}

// The rows where sequences begin, the first row after the last one, and the end of all rows. An
// offset that lies outside of the array, or before an earlier one, is replaced by the nearest valid
// offset: whatever the offsets hold, sequences are rows of the array, and share none.
template <int warps>
__device__ inline void make_begins(const int* offsets, int entries, int total, int* begins,
                                   ListStorage<warps>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int before = 0;  // the largest offset so far
  for (int first = 0; first <= entries; first += 32 * warps) {
    const int entry = first + static_cast<int>(threadIdx.x);
    const bool given = 0 < entry && entry <= entries;  // the first sequence begins at row 0
    int begin = largest_so_far(given ? min(offsets[entry], total) : 0);
    if (threadIdx.x % 32 == 31) shared.of_warp[warp] = begin;
    __syncthreads();
    begin = max(begin, before);
    for (int i = 0; i < warps; ++i) {
      if (i < warp) begin = max(begin, shared.of_warp[i]);
      before = max(before, shared.of_warp[i]);
    }
    if (entry <= entries) begins[entry] = begin;
    __syncthreads();  // every warp's offset has been read
  }
  if (threadIdx.x == 0) begins[entries + 1] = total;
}

// Class 0 has the longest loops; the last class has the empty ones.
__device__ inline int class_of(int length) {
  if (length <= 0) return kClasses - 1;
  const int power = 31 - __clz(length);
  const int half = power > 0 ? length >> (power - 1) & 1 : 0;
  return kClasses - 2 - (2 * power + half);
}

// The keys of a sequence. For caches only their number is needed, to sort by it; the sequence after
// the last entry has no keys.
template <class Config>
__device__ inline RowsOfEntry keys_of(const typename Config::Params& params, int entry) {
  if constexpr (Config::of_caches) {
    return {0, entry < params.entries ? static_cast<const int*>(params.seqused_kv)[entry] : 0};
  } else {
    return rows_of_entry(static_cast<const int*>(params.kv_begins), entry);
  }
}

// The rows of a sequence, its tiles, and the class of their loops.
struct ListedSequence {
  RowsOfEntry queries;
  RowsOfEntry keys;
  int tiles;
  int kind;
};
template <class Config>
__device__ inline ListedSequence listed_sequence(const typename Config::Params& params, int entry) {
  const RowsOfEntry queries = rows_of_entry(static_cast<const int*>(params.q_begins), entry);
  const RowsOfEntry keys = keys_of<Config>(params, entry);
  const int of_tiles = Config::rows_of_keys ? keys.count : queries.count;
  const int of_loop = Config::rows_of_keys ? queries.count : keys.count;
  return {queries, keys, ceil_div(of_tiles, Config::block),
          class_of(entry < params.entries ? of_loop : 0)};
}

// Lists the tiles of `sequences` sequences; the rows after the last one count as a sequence.
template <class Config, class Storage>
__device__ inline void list_tiles(const typename Config::Params& params, int sequences,
                                  PackedItem* items, Storage& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kClasses) shared.first[thread] = 0;
  __syncthreads();
  for (int entry = thread; entry < sequences; entry += 32 * Config::warps) {
    const ListedSequence sequence = listed_sequence<Config>(params, entry);
    atomicAdd(&shared.first[sequence.kind], sequence.tiles);
  }
  __syncthreads();
  if (thread == 0) {
    int before = 1;
    for (int kind = 0; kind < kClasses; ++kind) {
      const int count = shared.first[kind];
      shared.first[kind] = before;
      before += count;
    }
    items[0] = {before - 1, 0};
    shared.end = before;
  }
  __syncthreads();
  if constexpr (Config::rows_of_keys) {
    const int room = 1 + most_tiles(params.shape.seqlen_kv, sequences, Config::block);
    for (int i = shared.end + thread; i < room; i += 32 * Config::warps) items[i] = {-1, 0};
  }
  for (int entry = thread / 32; entry < sequences; entry += Config::warps) {
    const ListedSequence sequence = listed_sequence<Config>(params, entry);
    int begin = 0;
    if (thread % 32 == 0) begin = atomicAdd(&shared.first[sequence.kind], sequence.tiles);
    begin = __shfl_sync(0xffffffffu, begin, 0);
    for (int i = thread % 32; i < sequence.tiles; i += 32) {
      const int tile = Config::last_first ? sequence.tiles - 1 - i : i;
      items[begin + i] = PackedItem{entry, tile, sequence.queries, sequence.keys};
    }
  }
}

template <class Config>
__device__ inline void list_items(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ListStorage<Config::warps>*>(shared_bytes);
  static_assert(sizeof(shared) <= Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const int entries = static_cast<int>(params.entries);
  const void* const offsets = Config::of_caches ? params.query_offsets : params.cu_seqlens_q;
  make_begins(static_cast<const int*>(offsets), entries, params.shape.seqlen_q,
              static_cast<int*>(params.q_begins), shared);
  if constexpr (!Config::of_caches) {
    make_begins(static_cast<const int*>(params.cu_seqlens_kv), entries, params.shape.seqlen_kv,
                static_cast<int*>(params.kv_begins), shared);
  }
  auto* const items =
      static_cast<PackedItem*>(Config::rows_of_keys ? params.kv_items : params.q_items);
  if (items == nullptr) return;  // FlashAttention-1 takes whole sequences
  __syncthreads();               // all begins are written
  list_tiles<Config>(params, entries + 1, items, shared);
}

}  // namespace cuflash::steps
