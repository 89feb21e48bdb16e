// Appends new tokens to caches of keys and values in place, and rotates keys and queries by their
// positions (Su et al. 2021, "RoFormer"). A warp takes a row of a head. Tokens that do not fit are
// left out and counted.
#include "../tile/copy.cuh"
#include "../tile/numeric.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/stored.cuh"
#include "append_types.cuh"

namespace cuflash::steps {

// The angles of a row: its first 2 * `pairs` columns are rotated in pairs, the others are not. If
// the tables have no angles for the position, the rotated columns become NaN.
template <class Compute>
struct Rotation {
  const Compute* cos;
  const Compute* sin;
  int pairs;
  bool interleaved;
  bool known;
};

template <class Config>
__device__ inline Rotation<typename Config::Compute> rotation_at(
    const typename Config::Params& params, long long position) {
  using Compute = typename Config::Compute;
  if (params.rotates == 0) return {nullptr, nullptr, 0, false, true};
  const auto* cos = static_cast<const Compute*>(params.rotary_cos);
  const auto* sin = static_cast<const Compute*>(params.rotary_sin);
  const bool known = 0 <= position && position < params.rotary_rows;
  const long long first = known ? position * params.rotary_pairs : 0;
  return {cos + first, sin + first, static_cast<int>(params.rotary_pairs),
          params.rotary_interleaved != 0, known};
}

// Products are rounded before they are added, so that every machine gives the same bits.
template <class Storage, class Cell, class Compute, class Row>
__device__ inline void rotate_pair(const Storage* from, Cell* to, int pair,
                                   const Rotation<Compute>& rotation, const Row& stored) {
  const int first = rotation.interleaved ? 2 * pair : pair;
  const int second = rotation.interleaved ? first + 1 : pair + rotation.pairs;
  if (!rotation.known) {
    const Compute nan = infinity<Compute>() - infinity<Compute>();
    to[first] = to[second] = stored(from_compute<Storage>(nan));
    return;
  }
  const Compute x = to_compute(from[first]);
  const Compute y = to_compute(from[second]);
  const Compute cos = rotation.cos[pair];
  const Compute sin = rotation.sin[pair];
  to[first] = stored(from_compute<Storage>(rounded_product(x, cos) - rounded_product(y, sin)));
  to[second] = stored(from_compute<Storage>(rounded_product(x, sin) + rounded_product(y, cos)));
}

template <class Storage, class Cell, class Compute, class Row>
__device__ inline void copy_row(const Storage* from, Cell* to, int columns,
                                const Rotation<Compute>& rotation, const Row& stored) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = lane; i < columns - rotation.pairs; i += 32) {
    if (i < rotation.pairs) {
      rotate_pair(from, to, i, rotation, stored);
    } else {
      to[rotation.pairs + i] = stored(from[rotation.pairs + i]);
    }
  }
}

template <class Storage>
__device__ inline Storage* row_at(const Tensor& tensor, long long batch, long long row, int head) {
  return static_cast<Storage*>(tensor.data) + batch * tensor.batch_stride +
         row * tensor.row_stride + head * tensor.head_stride;
}

template <class Config>
__device__ inline void append_row(const typename Config::Params& params, long long number,
                                  bool of_keys) {
  using Storage = typename Config::Storage;
  using Cell = typename Config::Stored::template Cell<Storage>;
  const Shape& shape = params.shape;
  const RowOfAll at = row_of_all(params, number, shape.seqlen_kv, shape.heads_kv, 0);
  const Slot slot = slot_of(params, at.entry, at.row);
  if (slot.entry < 0) return;
  const Tensor& source = of_keys ? params.k : params.v;
  const Tensor& cache = of_keys ? params.k_cache : params.v_cache;
  auto rotation = rotation_at<Config>(params, first_position(params, at.entry) + at.row);
  if (!of_keys) rotation.pairs = 0;
  copy_row(row_at<Storage>(source, at.batch, at.place, at.head),
           row_at<Cell>(cache, slot.entry, slot.row, at.head),
           of_keys ? shape.head_dim : shape.head_dim_v, rotation,
           Config::Stored::row_of(params, of_keys, at.entry, at.head));
}

template <class Config>
__device__ inline void rotate_query(const typename Config::Params& params, long long number) {
  using Storage = typename Config::Storage;
  const Shape& shape = params.shape;
  const RowOfAll at = row_of_all(params, number, shape.seqlen_q, shape.heads_q, 0);
  const long long further = params.queries_advance != 0 ? at.row : 0;
  copy_row(row_at<Storage>(params.q, at.batch, at.place, at.head),
           row_at<Storage>(params.q_rotated, at.batch, at.place, at.head), shape.head_dim,
           rotation_at<Config>(params, first_position(params, at.entry) + further),
           StoredAsComputed::Row());
}

// The number of an entry's tokens whose pages do not exist, among the pages that this lane of the
// warp reads.
template <class Params>
__device__ inline int tokens_of_no_page(const Params& params, int entry, int lane) {
  const long long begin = length_before(params, entry);
  const long long end = begin + tokens_with_slots(params, entry);
  const long long size = params.page_size;
  int lost = 0;
  for (long long page = begin / size + lane; page * size < end; page += 32) {
    if (entry_of_cache(params, entry, page) >= 0) continue;
    const long long first = page * size < begin ? begin : page * size;
    const long long last = (page + 1) * size < end ? (page + 1) * size : end;
    lost += static_cast<int>(last - first);
  }
  return lost;
}

// A warp counts the tokens of an entry that do not fit, and computes the length of the entry with
// the tokens that fit.
template <class Config>
__device__ inline void count_tokens(const typename Config::Params& params, int entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int lost = 0;
  if (params.page_table != nullptr) {
    lost = tokens_of_no_page(params, entry, lane);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      lost += __shfl_xor_sync(0xffffffffu, lost, distance);
    }
  }
  if (lane != 0) return;
  int fitting = static_cast<int>(tokens_with_slots(params, entry)) - lost;
  if (params.page_table == nullptr && entry_of_cache(params, entry, 0) < 0) fitting = 0;
  if (params.overflow != nullptr) params.overflow[entry] = new_tokens(params, entry, 0) - fitting;
  if (params.lengths_after == nullptr) return;
  params.lengths_after[entry] = static_cast<int>(length_before(params, entry)) + fitting;
}

template <class Config>
__device__ inline void append_kv(const typename Config::Params& params) {
  const Shape& shape = params.shape;
  const long long of_keys = rows_of_heads(params, shape.seqlen_kv, shape.heads_kv, 0);
  const long long of_queries = rows_of_heads(params, shape.seqlen_q, shape.heads_q, 0);
  const long long all_warps = static_cast<long long>(gridDim.x) * Config::warps;
  const long long warp = static_cast<long long>(blockIdx.x) * Config::warps + threadIdx.x / 32;
  for (long long i = warp; i < 2 * of_keys + of_queries; i += all_warps) {
    if (i < 2 * of_keys) {
      append_row<Config>(params, i < of_keys ? i : i - of_keys, i < of_keys);
    } else {
      rotate_query<Config>(params, i - 2 * of_keys);
    }
  }
  for (long long entry = warp; entry < shape.batch; entry += all_warps) {
    count_tokens<Config>(params, static_cast<int>(entry));
  }
}

}  // namespace cuflash::steps
