// steps/bias_gradient.cu: the tiles of a step, in shared memory and in registers.
#pragma once

#include "../tile/shared_tile.cuh"
#include "../tile/softmax.cuh"
#include "../tile/warp_tile.cuh"

namespace cuflash::steps {

template <class Config>
struct BiasGradientTypes {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int threads = 32 * Config::warps;  // of a walker
  using Scores = WarpTile<Compute, Config::fragment_rows, Config::block_q / Config::score_grid_rows,
                          Config::block_kv / Config::score_grid_columns>;
  static_assert(Config::score_grid_rows * Config::score_grid_columns == Config::warps,
                "every warp has a part");
  using Rows = RowValues<Scores>;
  static constexpr int width =
      Config::head_dim > Config::head_dim_v ? Config::head_dim : Config::head_dim_v;
  using QTile = SharedTile<Storage, Config::block_q, Config::head_dim>;
  using KTile = SharedTile<Storage, Config::block_kv, Config::head_dim>;
  using DoutTile = SharedTile<Storage, Config::block_q, Config::head_dim_v>;
  using VTile = SharedTile<Storage, Config::block_kv, Config::head_dim_v>;
};

// The operands of a product of a step: Q and K, or dO and V.
template <class Config, class Types = BiasGradientTypes<Config>>
struct BiasGradientSlot {
  SharedArray<typename Config::Storage, Config::block_q * Types::width> queries;
  SharedArray<typename Config::Storage, Config::block_kv * Types::width> keys;
};

// When the walkers have finished, the sums of all but the first overlie the operands.
template <class Config, int others = Config::walkers - 1>
union BiasGradientStorage {
  BiasGradientSlot<Config> slots[Config::walkers][Config::slots];
  typename Config::Compute sums[others > 0 ? others : 1]
                               [others > 0 ? Config::block_q * Config::block_kv : 1];
};

}  // namespace cuflash::steps
