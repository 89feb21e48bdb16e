// Backward passes: the tiles of a thread block and the order in which it visits them.
#pragma once

#include "copy.cuh"
#include "pair_sums.cuh"
#include "product.cuh"
#include "shared_tile.cuh"
#include "shown_tiles.cuh"
#include "softmax.cuh"
#include "tile_io.cuh"

namespace cuflash {

// Each kind of product divides its result among the warps in its own grid, because the results have
// different shapes: S and dP [block_q, block_kv], dK and dV [block_kv, head_dim(_v)], dQ [block_q,
// head_dim]. P and dS pass from one grid to the next through shared memory.
template <class Config>
struct BackwardTypes {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int threads = 32 * Config::warps;

  using ScoreGrid = WarpGrid<Config::score_grid_rows, Config::score_grid_columns>;
  using KvGrid = WarpGrid<Config::kv_grid_rows, Config::kv_grid_columns>;
  using QGrid = WarpGrid<Config::q_grid_rows, Config::q_grid_columns>;
  static_assert(ScoreGrid::warps <= Config::warps && KvGrid::warps <= Config::warps &&
                    QGrid::warps <= Config::warps,
                "a grid has more warps than the block");

  using Scores = WarpTile<Compute, Config::fragment_rows, Config::block_q / Config::score_grid_rows,
                          Config::block_kv / Config::score_grid_columns>;
  // Whether S and dP are computed together: a warp has few fragments of them.
  static constexpr bool together = Config::products == ProductKind::tensor_cores &&
                                   Config::head_dim == Config::head_dim_v &&
                                   Scores::row_fragments * Scores::column_fragments < 4;
  using KGradient =
      WarpTile<Compute, Config::fragment_rows, Config::block_kv / Config::kv_grid_rows,
               Config::head_dim / Config::kv_grid_columns>;
  using VGradient =
      WarpTile<Compute, Config::fragment_rows, Config::block_kv / Config::kv_grid_rows,
               Config::head_dim_v / Config::kv_grid_columns>;
  using QGradient = WarpTile<Compute, Config::fragment_rows, Config::block_q / Config::q_grid_rows,
                             Config::head_dim / Config::q_grid_columns>;
  using Rows = RowValues<Scores>;

  using KTile = SharedTile<Storage, Config::block_kv, Config::head_dim>;
  using VTile = SharedTile<Storage, Config::block_kv, Config::head_dim_v>;
  using QTile = SharedTile<Storage, Config::block_q, Config::head_dim>;
  using DoutTile = SharedTile<Storage, Config::block_q, Config::head_dim_v>;
  using ScoreTile = SharedTile<Storage, Config::block_q, Config::block_kv>;
};

// One step of the inner loop: a query head of the group and a q tile of it.
struct QStep {
  int head;
  int q_tile;
  int q_begin;  // its first query
  int stage;
  bool edge;
};

// Whether the loop leaves out steps that a term hides entirely. Ordered sums of dQ count every
// step.
template <class Config>
__device__ constexpr auto counts_steps(int) -> decltype(Config::ordered != 0) {
  return Config::ordered != 0;
}
template <class Config>
__device__ constexpr bool counts_steps(long) {  // FlashAttention-1 has no such sums
  return false;
}
template <class Config>
constexpr bool skips_steps = Config::Score::skips && !counts_steps<Config>(0);

// The inner loop over the query heads of a group and the q tiles that see a kv tile.
template <class Config, bool = skips_steps<Config>>
struct QSteps {
  QBlocks<Config> blocks;
  int first_head;
  int count;

  __device__ QSteps(const typename Config::Params&, const Sequence& seq, int kv_begin,
                    int first_head, int heads)
      : blocks(seq, kv_begin), first_head(first_head), count((blocks.end - blocks.begin) * heads) {}

  __device__ QStep first() const { return step_of(first_head, blocks.begin, 0); }

  __device__ QStep after(const QStep& step) const {
    const int stage = step.stage + 1 == Config::num_stages ? 0 : step.stage + 1;
    if (step.q_tile + 1 < blocks.end) return step_of(step.head, step.q_tile + 1, stage);
    return step_of(step.head + 1, blocks.begin, stage);
  }

 private:
  __device__ QStep step_of(int head, int q_tile, int stage) const {
    const Block block = blocks[q_tile];
    return {head, block.index, block.index * Config::block_q, stage, block.edge};
  }
};

// The same loop without the steps that a term hides entirely.
template <class Config>
struct QSteps<Config, true> {
  const typename Config::Params& params;
  QBlocks<Config> blocks;
  int first_head;
  int end_head;
  int count = 0;

  __device__ QSteps(const typename Config::Params& params, const Sequence& seq, int kv_begin,
                    int first_head, int heads)
      : params(params),
        blocks(seq, kv_begin),
        first_head(first_head),
        end_head(first_head + heads) {
    for (int head = first_head; head < end_head; ++head) {
      for (int tile = shown(head, blocks.begin); tile < blocks.end; tile = shown(head, tile + 1)) {
        ++count;
      }
    }
  }

  __device__ QStep first() const { return step_from(first_head, blocks.begin, 0); }

  __device__ QStep after(const QStep& step) const {
    return step_from(step.head, step.q_tile + 1, (step.stage + 1) % Config::num_stages);
  }

 private:
  __device__ int shown(int head, int tile) const {
    return next_shown<Config>(params, blocks.seq, head, tile, blocks.end,
                              blocks.kv_begin / Config::block_kv);
  }
  // The first step at or after this position; after the last step, the end of the last head.
  __device__ QStep step_from(int head, int q_tile, int stage) const {
    int tile = shown(head, q_tile);
    while (tile >= blocks.end && head + 1 < end_head) tile = shown(++head, blocks.begin);
    return {head, tile, tile * Config::block_q, stage,
            is_edge_tile<Config>(blocks.seq, tile * Config::block_q, blocks.kv_begin)};
  }
};

}  // namespace cuflash
