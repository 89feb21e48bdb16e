// FlashAttention-3 backward, blocks of rows: they compute dQ = scale * the sums and round it while
// other blocks multiply. A separate kernel (steps/convert_dq.cu) is bound by device memory and
// leaves the matrix units idle. A few multiprocessors do the same work in less time while the
// others multiply, and find the fresh sums in L2. bench/NOTES.md has the figures.
//
// Every kv tile has a share of its head's rows, as in backward_clear.cuh. One block of rows
// precedes each round of Config::kv_tiles_per_convert_block blocks of tiles. It finishes the shares
// of that many tiles, `convert_lag` tiles before those of the round, so that it hardly ever waits.
// The last shares are finished after all tiles.
//
// Who waits for whom, by a counter in device memory for every kv head:
//   summed   a block that finishes a share, for the blocks of all kv tiles of the head; each of
//            these adds to dQ only after the sums are cleared
#pragma once

#include "backward_clear.cuh"

namespace cuflash::fa3 {

// One thread counts this block's tile as summed, after all warps of math have issued their
// additions to dQ. pass_turn() orders these additions before the count.
template <class Config>
__device__ inline void pass_sums(const BackwardContext<Config>& c) {
  jitter<Config>();
  ptx::pass_turn(&counters_of(c.params, batch_of(c), c.item.head).summed);
}

// The role of one thread outside the math warps, in kernels whose sums have no order.
template <class Config>
__device__ inline void sums_role(const BackwardContext<Config>& c) {
  if constexpr (Config::kv_tiles_per_convert_block > 0) {
    wait<Config>(c.shared.added[0], 0);
    pass_sums(c);
  }
}

// Sixteen rows of a query head.
struct RowUnit {
  int batch;
  int head;
  int row;
};

// The shared memory of a block of rows.
template <class Config>
struct RowStorage {
  StagedRows staging[BackwardTypes<Config>::threads / 32];
  RowShare finished[Config::kv_tiles_per_convert_block];
};

// The units of several shares, in turn.
template <class Config>
struct RowUnits {
  const typename Config::Params& params;
  const RowShare* const shares;
  const unsigned of_share;  // units of a tile's share of a query head
  const unsigned count;     // of all shares

  __device__ RowUnits(const typename Config::Params& params, const RowShare* shares, int count)
      : params(params),
        shares(shares),
        of_share(units_of_share<Config>(params)),
        count(count * of_share * (params.shape.heads_q / params.shape.heads_kv)) {}

  // The shares of a head's tiles may hold more units than the head has. The rows of the extra units
  // lie beyond the length.
  __device__ RowUnit at(unsigned i) const {
    const unsigned group = params.shape.heads_q / params.shape.heads_kv;
    const unsigned heads = i / of_share;  // query heads whose units come before
    const unsigned before = group == 1 ? heads : heads / group;
    const RowShare& share = shares[before];
    return {share.batch, static_cast<int>(share.kv_head * group + heads - before * group),
            share.row + static_cast<int>(i - heads * of_share) * kRowsOfUnit};
  }
  __device__ long long workspace_row(const RowUnit& unit) const {
    return (static_cast<long long>(unit.batch) * params.shape.heads_q + unit.head) *
               params.padded_rows +
           unit.row;
  }
};

// Some columns of a unit: loads the sums of dQ and stores dQ.
template <class Config>
struct UnitToFinish {
  using Storage = typename Config::Storage;
  static constexpr int columns = Config::head_dim % 64 == 0 ? 64 : 32;
  static constexpr int parts = Config::head_dim / columns;  // of a unit
  static constexpr int at_once = 128 / columns;             // by a warp
  static_assert(parts * columns == Config::head_dim, "whole parts");
  RowUnit unit;
  int column;
  bool exists;
  WarpTile<float, 16, 16, columns> sums;

  __device__ __forceinline__ void load(const RowUnits<Config>& units, unsigned i, bool any) {
    const Shape& shape = units.params.shape;
    if (any) unit = units.at(i / parts);
    column = static_cast<int>(i % parts) * columns;
    exists = any && unit.row < shape.seqlen_q && column < shape.head_dim;
    if (!exists) return;
    load_from_accumulator<Config, ByFragments>(
        static_cast<const float*>(units.params.dq_accumulator), sums, units.workspace_row(unit), 0,
        column);
  }

  // The number of the `rest` columns that may be stored. store_staged() stores at most 64 columns,
  // so only narrower parts need a limit.
  __device__ static int valid_columns(int rest) {
    return columns % 64 == 0 ? rest : min(columns, rest);
  }

  __device__ __forceinline__ void finish(const RowUnits<Config>& units, StagedRows& staging) {
    if (!exists) return;
    const typename Config::Params& params = units.params;
    const float scale = static_cast<float>(params.scale);
    sums.for_each([&](float& x, int, int, int, int) { x *= scale; });
    const Sequence seq = sequence<Config>(params, unit.batch);
    store_staged(sums, staging, q_row<Storage>(params.dq, seq, unit.head, unit.row) + column,
                 params.dq.row_stride, params.shape.seqlen_q - unit.row,
                 valid_columns(params.shape.head_dim - column));
  }
};

// The number of blocks that add to the rows of a share.
template <class Config>
__device__ inline int adding_blocks(const typename Config::Params& params, const RowShare& share) {
  const int tiles = kv_tiles_of_head<Config>(params);
  if constexpr (Config::cut_last) {
    const long long end = (share.batch * params.shape.heads_kv + share.kv_head + 1ll) * tiles;
    const int cut = static_cast<int>(max(0ll, min(end - params.whole_tiles, 0ll + tiles)));
    return tiles + cut * (static_cast<int>(params.parts) - 1);
  }
  return tiles;
}

// The work of a block of the grid: a kv tile, or shares of rows to finish.
template <class Config>
struct BlockPlace {
  unsigned tile;  // its place among the blocks with a tile, if `has_tile`
  bool has_tile;
  long long finished;  // otherwise the first tile whose share it finishes
  int shares;          // the number of shares it finishes

  __device__ explicit BlockPlace(const typename Config::Params& params) {
    const unsigned tiles = places_of<Config>(params, kv_tiles_of_all<Config>(params));
    constexpr unsigned blocks = Config::kv_tiles_per_convert_block + 1;  // of a round
    const unsigned rounds =
        (tiles + Config::kv_tiles_per_convert_block - 1) / Config::kv_tiles_per_convert_block;
    const unsigned round = blockIdx.x / blocks;
    const unsigned within = blockIdx.x % blocks;
    unsigned first = min(round, rounds) * Config::kv_tiles_per_convert_block;
    tile = first + within - 1;
    has_tile = round < rounds && within > 0 && tile < tiles;
    shares = Config::kv_tiles_per_convert_block;
    if constexpr (Config::cut_last) {
      if (has_tile) return;
      const unsigned end = PlacedTile<Config>(params, first + shares).tile;
      first = PlacedTile<Config>(params, first).tile;
      shares = static_cast<int>(end - first);
    }
    finished = first - params.convert_lag;
    if (round >= rounds) {  // after all tiles a block finishes one share
      finished += blockIdx.x - rounds * blocks;
      shares = 1;
    } else if (within > 0) {  // it has a tile, or no work after the last tile of the last round
      shares = 0;
    }
  }
};

// A whole block finishes the units. A warp loads several units at once, which hides the latency of
// memory.
template <class Config>
__device__ inline void finish_units(const RowUnits<Config>& units, StagedRows& staging) {
  using Unit = UnitToFinish<Config>;
  const unsigned warps = blockDim.x / 32;
  const unsigned count = units.count * Unit::parts;
#pragma unroll 1
  for (unsigned i = threadIdx.x / 32; i < count; i += Unit::at_once * warps) {
    Unit unit[Unit::at_once];
#pragma unroll
    for (int j = 0; j < Unit::at_once; ++j) {
      const unsigned mine = i + j * warps;
      unit[j].load(units, mine, mine < count);
    }
#pragma unroll
    for (int j = 0; j < Unit::at_once; ++j) unit[j].finish(units, staging);
  }
}

template <class Config>
__device__ inline void row_block(const typename Config::Params& params,
                                 const BlockPlace<Config>& place, RowStorage<Config>& shared) {
  const long long tiles = kv_tiles_of_all<Config>(params);
  const long long first = max(place.finished, 0ll);
  const int count = static_cast<int>(max(min(place.finished + place.shares, tiles) - first, 0ll));
  const int mine = static_cast<int>(threadIdx.x);
  if (mine < count) {
    const RowShare share = share_of<Config>(params, first + mine);
    shared.finished[mine] = share;
    await_count<Config>(&counters_of(params, share.batch, share.kv_head).summed,
                        adding_blocks<Config>(params, share));
  }
  __syncthreads();
  const RowUnits<Config> units(params, shared.finished, count);
  finish_units(units, shared.staging[mine / 32]);
}

}  // namespace cuflash::fa3
