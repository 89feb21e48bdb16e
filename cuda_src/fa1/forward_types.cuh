// FlashAttention-1 forward: the tiles of a thread block, in shared memory and in registers.
#pragma once

#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/shared_tile.cuh"
#include "../tile/shown_tiles.cuh"
#include "../tile/softmax.cuh"
#include "../tile/tile_io.cuh"

namespace cuflash::fa1 {

// warps_q x warps_kv warps divide a score tile. The warps_kv warps of a row of that grid are a row
// group. Only a group reads and writes its rows of Q, O, m and l, so the groups of a block run
// independently and wait for each other only when K and V change. If a group has several warps,
// they divide the keys: each warp's product P V is a partial sum, which the group exchanges.
template <class Config>
struct ForwardTypes {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int rows_per_warp = Config::block_q / Config::warps_q;
  static constexpr int keys_per_warp = Config::block_kv / Config::warps_kv;
  static constexpr int threads = 32 * Config::warps_q * Config::warps_kv;
  static constexpr int row_threads = 32 * Config::warps_kv;  // of a row group
  static constexpr bool keys_parted = Config::warps_kv > 1;
  static constexpr bool scratch_needed = Config::products == ProductKind::scalar;

  using Scores = WarpTile<Compute, Config::fragment_rows, rows_per_warp, keys_per_warp>;
  using Output = WarpTile<Compute, Config::fragment_rows, rows_per_warp, Config::head_dim_v>;
  using Rows = RowValues<Scores>;

  using KTile = SharedTile<Storage, Config::block_kv, Config::head_dim>;
  using VTile = SharedTile<Storage, Config::block_kv, Config::head_dim_v>;
  using QTile = SharedTile<Storage, rows_per_warp, Config::head_dim>;    // of a row group
  using OTile = SharedTile<Compute, rows_per_warp, Config::head_dim_v>;  // of a row group
  using PTile = SharedTile<Storage, rows_per_warp, Config::block_kv>;    // of a row group
};

// The shared memory of one row group.
template <class Config, class Types = ForwardTypes<Config>>
struct RowGroupStorage {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int rows = Types::rows_per_warp;
  SharedArray<Storage, rows * Config::head_dim> q;    // [rows, head_dim]
  SharedArray<Compute, rows * Config::head_dim_v> o;  // [rows, head_dim_v]
  // [warps_kv, rows, head_dim_v], if keys are parted
  SharedArray<Compute, Types::keys_parted ? Config::warps_kv * rows * Config::head_dim_v : 0>
      partial;
  // [rows, block_kv], if the products are scalar
  SharedArray<Storage, Types::scratch_needed ? rows * Config::block_kv : 0> p;
  SharedArray<Compute, Config::warps_kv * rows> row_max;  // [warps_kv, rows]
  SharedArray<Compute, Config::warps_kv * rows> row_sum;  // [warps_kv, rows]
};

template <class Config, class Types = ForwardTypes<Config>>
struct ForwardStorage {
  using Storage = typename Config::Storage;
  SharedArray<Storage, Config::block_kv * Config::head_dim> k;    // [block_kv, head_dim]
  SharedArray<Storage, Config::block_kv * Config::head_dim_v> v;  // [block_kv, head_dim_v]
  RowGroupStorage<Config> group[Config::warps_q];
};

// The context of every step of a thread block, the same for all its tiles.
template <class Config, class Types = ForwardTypes<Config>>
struct ForwardContext {
  const typename Config::Params& params;
  ForwardStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  const int kv_head;
  const WarpGrid<Config::warps_q, Config::warps_kv> warp;

  __device__ typename Types::KTile k() const { return {shared.k.data}; }
  __device__ typename Types::VTile v() const { return {shared.v.data}; }
  __device__ RowGroupStorage<Config>& group() const { return shared.group[warp.row]; }
  __device__ typename Types::QTile q() const { return {group().q.data}; }
  __device__ typename Types::OTile o() const { return {group().o.data}; }
  __device__ typename Types::PTile p() const { return {group().p.data}; }
  __device__ typename Types::OTile partial(int warp_kv) const {
    return {group().partial.data + warp_kv * Types::rows_per_warp * Config::head_dim_v};
  }

  // The first query of this row group in a q tile, and the first key of this warp in the kv tile.
  __device__ int first_query(int q_tile) const {
    return q_tile * Config::block_q + warp.row * Types::rows_per_warp;
  }
  __device__ int key0() const { return warp.column * Types::keys_per_warp; }

  // A row of an accumulator in the workspace.
  __device__ typename Config::Compute* out_accumulator(int row) const {
    return static_cast<typename Config::Compute*>(params.out_accumulator) +
           workspace_row(params.shape, seq, item.head, row) * Config::head_dim_v;
  }
  __device__ typename Config::Compute& row_max(int row) const {
    return static_cast<typename Config::Compute*>(
        params.row_max)[workspace_row(params.shape, seq, item.head, row)];
  }
  __device__ typename Config::Compute& row_sum(int row) const {
    return static_cast<typename Config::Compute*>(
        params.row_sum)[workspace_row(params.shape, seq, item.head, row)];
  }
};

}  // namespace cuflash::fa1
