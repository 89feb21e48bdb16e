// The gradient of a bias: dS = P (dP - delta) of every pair, before the slopes of its score, summed
// over what the bias broadcasts.
//
// One thread block owns a tile of the result, and walks over all pairs that it is the sum of, in
// one order: nobody else adds to it, and nothing quadratic is kept. S and dP are computed anew from
// Q, K, V and dO. By what the bias differs from pair to pair a block owns
//   queries and keys   a tile of both, of one entry and head of the bias: it walks over the entries
//                      and heads that share it, and writes the result
//   keys               the keys of a kv tile, of one entry and head of the call: it walks over the
//                      queries. Its sums are parts, which steps/reduce_bias.cu adds up
//   queries, neither   the queries of a q tile likewise
#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/schedule.cuh"
#include "../tile/shared_tile.cuh"
#include "../tile/softmax.cuh"
#include "../tile/warp_tile.cuh"

namespace cuflash::steps {

// [begin, end), one after the other.
struct Walk {
  int begin;
  int end;
};

template <class Config>
struct BiasGradientTypes {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int threads = 32 * Config::warps;
  using Grid = WarpGrid<Config::score_grid_rows, Config::score_grid_columns>;
  static_assert(Grid::warps == Config::warps, "every warp has a part");
  using Scores = WarpTile<Compute, Config::fragment_rows, Config::block_q / Config::score_grid_rows,
                          Config::block_kv / Config::score_grid_columns>;
  using Rows = RowValues<Scores>;
  static constexpr int width =
      Config::head_dim > Config::head_dim_v ? Config::head_dim : Config::head_dim_v;
  using QTile = SharedTile<Storage, Config::block_q, Config::head_dim>;
  using KTile = SharedTile<Storage, Config::block_kv, Config::head_dim>;
  using DoutTile = SharedTile<Storage, Config::block_q, Config::head_dim_v>;
  using VTile = SharedTile<Storage, Config::block_kv, Config::head_dim_v>;
};

// Q and K of a step, then dO and V in their place.
template <class Config, class Types = BiasGradientTypes<Config>>
struct BiasGradientStorage {
  SharedArray<typename Config::Storage, Config::block_q * Types::width> queries;
  SharedArray<typename Config::Storage, Config::block_kv * Types::width> keys;
};

// What a block owns, and the ranges of what it walks over.
template <class Config>
struct BiasItem {
  Walk entries;
  Walk heads;
  Walk q_tiles;
  Walk kv_tiles;
  int result_entry = 0;

  __device__ BiasItem(const typename Config::Params& params, long long block) {
    const Shape& shape = params.shape;
    q_tiles = {0, ceil_div(shape.seqlen_q, Config::block_q)};
    kv_tiles = {0, ceil_div(shape.seqlen_kv, Config::block_kv)};
    if constexpr (Config::by_keys) kv_tiles = own(block, kv_tiles.end);
    if constexpr (Config::by_rows) q_tiles = own(block, q_tiles.end);
    constexpr bool whole = Config::by_rows && Config::by_keys;  // a result, no part
    heads = whole && params.bias_heads == 1 ? Walk{0, shape.heads_q} : own(block, shape.heads_q);
    entries = own(block, whole ? static_cast<int>(params.bias_batch) : shape.batch);
    if constexpr (whole) {
      result_entry = entries.begin;
      const int shared = shape.batch / static_cast<int>(params.bias_batch);
      entries = {entries.begin * shared, (entries.begin + 1) * shared};
    }
  }

 private:
  // One of `count`, and the block's number among those that have the same.
  __device__ static Walk own(long long& block, int count) {
    const int index = static_cast<int>(block % count);
    block /= count;
    return {index, index + 1};
  }
};

template <class Config, class Types = BiasGradientTypes<Config>>
struct BiasGradient {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  using Scores = typename Types::Scores;
  using Rows = typename Types::Rows;
  const typename Config::Params& params;
  BiasGradientStorage<Config>& shared;
  const typename Types::Grid warp;
  const int row0;  // of this warp, in a tile
  const int key0;
  Scores sum;

  __device__ BiasGradient(const typename Config::Params& params,
                          BiasGradientStorage<Config>& shared)
      : params(params),
        shared(shared),
        row0(warp.row * Scores::rows),
        key0(warp.column * Scores::columns) {
    sum.fill(0);
  }

  // All pairs of an item.
  __device__ void walk(const BiasItem<Config>& item) {
    for (int entry = item.entries.begin; entry < item.entries.end; ++entry) {
      const Sequence seq = sequence<Config>(params, entry);
      for (int head = item.heads.begin; head < item.heads.end; ++head) {
        for (int q_tile = item.q_tiles.begin; q_tile < item.q_tiles.end; ++q_tile) {
          const KvRange seen = kv_range<Config>(seq, q_tile);
          const int end = min(seen.end, item.kv_tiles.end);
          for (int tile = max(seen.begin, item.kv_tiles.begin); tile < end; ++tile) {
            add(seq, head, q_tile * Config::block_q, tile * Config::block_kv);
          }
        }
      }
    }
  }

  // The sums of a tile -> the result.
  __device__ void store(const BiasItem<Config>& item) const {
    using Bias = typename Config::Output;
    const PairArray& to = params.dbias;
    const LanePosition lane;
    const int row = item.q_tiles.begin * Config::block_q + row0 + lane.row;
    const int key = item.kv_tiles.begin * Config::block_kv + key0 + lane.column;
    // A head that the result does not have is 0, and its stride too.
    auto* first = static_cast<Bias*>(to.data) + item.result_entry * to.batch_stride +
                  item.heads.begin * to.head_stride + row * to.row_stride + key * to.column_stride;
    Scores::for_each_pair([&](int m, int n, int group) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int i = Scores::row(m, group), j = Scores::column(n, which);
        if (row + i >= params.shape.seqlen_q || key + j >= params.shape.seqlen_kv) continue;
        first[i * to.row_stride + j * to.column_stride] =
            from_compute<Bias>(sum.value[m][n][group][which]);
      }
    });
  }

  // The sums of every query over its keys -> their part.
  __device__ void store_rows(const BiasItem<Config>& item) const {
    static_assert(Config::score_grid_columns == 1 || !Config::by_rows || Config::by_keys,
                  "a row is of one warp");
    const LanePosition lane;
    Compute* to = part(item, params.shape.seqlen_q);
    const int row = item.q_tiles.begin * Config::block_q + row0 + lane.row;
    Rows rows;
    rows.for_each([&](Compute& total, int m, int group) {
      total = 0;
#pragma unroll
      for (int n = 0; n < Scores::column_fragments; ++n) {
        total += sum.value[m][n][group][0] + sum.value[m][n][group][1];
      }
      total = combine_row_lanes(total, [](Compute a, Compute b) { return a + b; });
      const int i = row + Scores::row(m, group);
      if (lane.column == 0 && i < params.shape.seqlen_q) to[i] = total;
    });
  }

  // The sums of every key over its queries -> their part.
  __device__ void store_keys(const BiasItem<Config>& item) const {
    static_assert(Config::score_grid_rows == 1 || Config::by_rows, "a key is of one warp");
    const LanePosition lane;
    Compute* to = part(item, params.shape.seqlen_kv);
    const int key = item.kv_tiles.begin * Config::block_kv + key0 + lane.column;
#pragma unroll
    for (int n = 0; n < Scores::column_fragments; ++n) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        Compute total = 0;
#pragma unroll
        for (int m = 0; m < Scores::row_fragments; ++m) {
#pragma unroll
          for (int group = 0; group < Scores::row_groups; ++group) {
            total += sum.value[m][n][group][which];
          }
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          total += __shfl_xor_sync(0xffffffffu, total, distance);
        }
        const int j = key + Scores::column(n, which);
        if (lane.row == 0 && j < params.shape.seqlen_kv) to[j] = total;
      }
    }
  }

 private:
  __device__ Compute* part(const BiasItem<Config>& item, int length) const {
    const long long head =
        static_cast<long long>(item.entries.begin) * params.shape.heads_q + item.heads.begin;
    return static_cast<Compute*>(params.bias_parts) + head * length;
  }

  // Rows of queries and of keys -> their places.
  template <class Queries, class Keys>
  __device__ void load(const Queries& queries, const Tensor& of_queries, const Keys& keys,
                       const Tensor& of_keys, const Sequence& seq, int head, int q_begin,
                       int kv_begin, int columns) const {
    const int kv_head = head / (params.shape.heads_q / params.shape.heads_kv);
    copy_tile<Config::copies, Types::threads>(
        queries, q_row<const Storage>(of_queries, seq, head, q_begin), of_queries.row_stride,
        seq.seqlen_q - q_begin, columns);
    copy_tile<Config::copies, Types::threads>(
        keys, kv_row<const Storage>(of_keys, seq, kv_head, kv_begin), of_keys.row_stride,
        seq.seqlen_kv - kv_begin, columns);
    commit_copies<Config::copies>();
  }

  // The log-sum-exp of this warp's rows in units of logits: plus infinity where P is 0.
  __device__ Rows lse_of(const Sequence& seq, int head, int row) const {
    const LanePosition lane;
    Rows rows;
    rows.for_each([&](Compute& x, int m, int group) {
      const int i = row + lane.row + Scores::row(m, group);
      x = infinity<Compute>();
      if (i >= seq.seqlen_q) return;
      const Compute given =
          *row_number<const typename Config::Statistics>(params.lse, seq, head, i);
      const Compute lse = lse_or_dead<Config>(seq, i, given);
      if (lse != -infinity<Compute>()) x = Logits<Config>::from_natural(lse);
    });
    return rows;
  }
  __device__ Rows delta_of(const Sequence& seq, int head, int row) const {
    const LanePosition lane;
    const long long first =
        (static_cast<long long>(seq.batch) * params.shape.heads_q + head) * params.padded_rows;
    Rows rows;
    rows.for_each([&](Compute& x, int m, int group) {
      const int i = row + lane.row + Scores::row(m, group);
      x = i < seq.seqlen_q ? static_cast<const Compute*>(params.delta)[first + i] : Compute(0);
    });
    return rows;
  }

  // dS of a tile, added.
  __device__ void add(const Sequence& seq, int head, int q_begin, int kv_begin) {
    const typename Types::QTile q{shared.queries.data};
    const typename Types::KTile k{shared.keys.data};
    const typename Types::DoutTile dout{shared.queries.data};
    const typename Types::VTile v{shared.keys.data};
    __syncthreads();  // the step before has read dO and V
    load(q, params.q, k, params.k, seq, head, q_begin, kv_begin, params.shape.head_dim);
    wait_copies<Config::copies, 0>();
    __syncthreads();
    Scores p, dp;
    p.fill(0);
    dp.fill(0);
    Products<Config>::template multiply_ahead<Config::head_dim>(p, rows_by_depth(q, row0),
                                                                rows_by_depth(k, key0));
    __syncthreads();
    load(dout, params.dout, v, params.v, seq, head, q_begin, kv_begin, params.shape.head_dim_v);
    prepare_scores<Config>(params, p, seq, head, q_begin + row0, kv_begin + key0,
                           is_edge_tile<Config>(seq, q_begin, kv_begin));
    const Rows lse = lse_of(seq, head, q_begin + row0);
    exponentials<Config>(p, logit_factor<Config>(params),
                         [&](int m, int, int group, int) { return lse.value[m][group]; });
    wait_copies<Config::copies, 0>();
    __syncthreads();
    Products<Config>::template multiply_ahead<Config::head_dim_v>(dp, rows_by_depth(dout, row0),
                                                                  rows_by_depth(v, key0));
    const Rows delta = delta_of(seq, head, q_begin + row0);
    // A pair without weight gives nothing, whatever dP is; nor does a dead row, whatever it holds.
    sum.for_each([&](Compute& x, int m, int n, int group, int which) {
      const Compute weight = p.value[m][n][group][which];
      const bool dead = lse.value[m][group] == infinity<Compute>();
      if (weight != Compute(0) && !dead) {
        x = fma(weight, dp.value[m][n][group][which] - delta.value[m][group], x);
      }
    });
  }
};

template <class Config>
__device__ inline void bias_gradient(const typename Config::Params& params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BiasGradientStorage<Config>*>(shared_bytes);
  static_assert(sizeof(BiasGradientStorage<Config>) == Config::shared_bytes,
                "the plan and the kernel disagree about shared memory");
  const BiasItem<Config> item(params, blockIdx.x);
  BiasGradient<Config> gradient(params, shared);
  gradient.walk(item);
  if constexpr (Config::by_rows && Config::by_keys) {
    gradient.store(item);
  } else if constexpr (Config::by_keys) {
    gradient.store_keys(item);
  } else {
    gradient.store_rows(item);
  }
}

}  // namespace cuflash::steps
