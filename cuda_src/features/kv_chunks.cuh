// Split keys: different blocks compute chunks of a q tile's keys, and steps/merge.cu merges their
// results.
//
// Chunk c has the keys [c * chunk, (c + 1) * chunk) for every q tile, so that its result for a row
// does not depend on later keys. The result is an output, which is divided by the chunk's own sum
// of weights, that sum, and the reference of its exponents. A log-sum-exp would replace the last
// two by one number, but it is rounded, and merging subtracts such numbers where they are large.
#pragma once

#include "../tile/schedule.cuh"
#include "../tile/softmax.cuh"

namespace cuflash {

struct KvChunksParams {
  void* out_parts;        // [chunks, batch, heads_q, seqlen_q, head_dim_v], contiguous
  void* reference_parts;  // [chunks, batch, heads_q, seqlen_q], contiguous, in units of logits
  void* sum_parts;        // the same, of weights in the scale of the reference
  int chunk;              // keys; whole tiles
  int chunks;             // of the longest row
};

struct KvChunks {
  static constexpr bool split = true;

  // The items of a q tile: one for each chunk, one after the other.
  template <class Params>
  __device__ static unsigned items_of_tile(const Params& params) {
    return params.kv_chunks.chunks;
  }
  template <class Params>
  __device__ static WorkItem placed(const Params& params, WorkItem item) {
    const int chunks = params.kv_chunks.chunks;
    item.split = item.q_tile % chunks;
    item.q_tile /= chunks;
    return item;
  }

  // The tiles of a range that lie in a chunk; there may be none.
  template <class Config>
  __device__ static KvRange cut(const typename Config::Params& params, KvRange range, int split) {
    const int tiles = params.kv_chunks.chunk / Config::block_kv;
    const int begin = max(range.begin, split * tiles);
    return {begin, max(begin, min(range.end, (split + 1) * tiles))};
  }
  // The chunks that hold the tiles of a range.
  template <class Config>
  __device__ static KvRange chunks_of(const typename Config::Params& params, KvRange range) {
    const int tiles = params.kv_chunks.chunk / Config::block_kv;
    if (range.begin >= range.end) return {0, 0};
    return {range.begin / tiles, ceil_div(range.end, tiles)};
  }

  template <class Config>
  __device__ static Tensor out(const typename Config::Params& params, int split) {
    const Shape& shape = params.shape;
    const long long head = static_cast<long long>(shape.seqlen_q) * shape.head_dim_v;
    const long long batch = head * shape.heads_q;
    auto* const parts = static_cast<typename Config::Compute*>(params.kv_chunks.out_parts);
    return {parts + split * out_stride<Config>(params), batch, shape.head_dim_v, head};
  }
  // Distance from the output of one chunk to that of the next, in elements.
  template <class Config>
  __device__ static long long out_stride(const typename Config::Params& params) {
    const Shape& shape = params.shape;
    return static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q * shape.head_dim_v;
  }

  // The reference or the sum of a row in a chunk; `parts` is the array of references or of sums.
  template <class Config>
  __device__ static typename Config::Compute& number(const typename Config::Params& params,
                                                     void* parts, const Sequence& seq, int head,
                                                     int row, int split) {
    const Shape& shape = params.shape;
    const long long place = workspace_row(shape, seq, head, row);
    const long long part = static_cast<long long>(shape.batch) * shape.heads_q * shape.seqlen_q;
    return static_cast<typename Config::Compute*>(parts)[split * part + place];
  }

  template <class Params>
  __device__ static bool keeps_rows(const Params&) {
    return true;
  }
  template <class Config, class Compute>
  __device__ static void keep_row(const typename Config::Params& params, const Sequence& seq,
                                  const WorkItem& item, int row, Compute reference, Compute sum) {
    const KvChunksParams& chunks = params.kv_chunks;
    if (is_surplus<Config>(seq, row)) reference = -infinity<Compute>(), sum = 0;
    number<Config>(params, chunks.reference_parts, seq, item.head, row, item.split) = reference;
    number<Config>(params, chunks.sum_parts, seq, item.head, row, item.split) = sum;
  }
};

}  // namespace cuflash
