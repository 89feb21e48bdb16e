// The tiles of packed sequences, those first whose loops are long: blocks draw them in this order,
// and the last ones to end are then short. One block lists them; the tiles of a sequence stay
// together and in order.
//
// Sequences are sorted into classes by the length of their loops, two for each power of two; in
// which order those of a class come makes no difference to what is computed.
#include "../features/packed_lengths.cuh"
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"

namespace cuflash::steps {

constexpr int kClasses = 64;

// The longest are of class 0, empty ones of the last.
__device__ inline int class_of(int length) {
  if (length <= 0) return kClasses - 1;
  const int power = 31 - __clz(length);
  const int half = power > 0 ? length >> (power - 1) & 1 : 0;
  return kClasses - 2 - (2 * power + half);
}

// Of a sequence, its tiles and the class of their loops.
struct ListedSequence {
  int tiles;
  int kind;
};
template <class Config>
__device__ inline ListedSequence listed_sequence(const typename Config::Params& params, int entry) {
  const int entries = static_cast<int>(params.entries);
  const RowsOfEntry queries = rows_of_entry(static_cast<const int*>(params.cu_seqlens_q), entries,
                                            params.shape.seqlen_q, entry);
  const RowsOfEntry keys = rows_of_entry(static_cast<const int*>(params.cu_seqlens_kv), entries,
                                         params.shape.seqlen_kv, entry);
  const int of_tiles = Config::rows_of_keys ? keys.count : queries.count;
  const int of_loop = Config::rows_of_keys ? queries.count : keys.count;
  return {ceil_div(of_tiles, Config::block), class_of(entry < entries ? of_loop : 0)};
}

template <class Config>
__device__ inline void list_items(const typename Config::Params& params) {
  constexpr int threads = 32 * Config::warps;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto* const first = reinterpret_cast<int*>(shared_bytes);  // item of a class that comes next
  static_assert(kClasses * sizeof(int) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  auto* const items =
      static_cast<PackedItem*>(Config::rows_of_keys ? params.kv_items : params.q_items);
  const int entries = static_cast<int>(params.entries) + 1;  // one of the rows behind the last
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kClasses) first[thread] = 0;
  __syncthreads();
  for (int entry = thread; entry < entries; entry += threads) {
    const ListedSequence sequence = listed_sequence<Config>(params, entry);
    atomicAdd(&first[sequence.kind], sequence.tiles);
  }
  __syncthreads();
  if (thread == 0) {
    int before = 1;
    for (int kind = 0; kind < kClasses; ++kind) {
      const int count = first[kind];
      first[kind] = before;
      before += count;
    }
    items[0] = {before - 1, 0};
  }
  __syncthreads();
  for (int entry = thread / 32; entry < entries; entry += Config::warps) {
    const ListedSequence sequence = listed_sequence<Config>(params, entry);
    int begin = 0;
    if (thread % 32 == 0) begin = atomicAdd(&first[sequence.kind], sequence.tiles);
    begin = __shfl_sync(0xffffffffu, begin, 0);
    for (int i = thread % 32; i < sequence.tiles; i += 32) {
      items[begin + i] = {entry, Config::last_first ? sequence.tiles - 1 - i : i};
    }
  }
}

}  // namespace cuflash::steps
