// FlashAttention-2 forward: the tiles of a thread block, in shared memory and in registers.
#pragma once

#include "../tile/copy.cuh"
#include "../tile/product.cuh"
#include "../tile/shared_tile.cuh"
#include "../tile/shown_tiles.cuh"
#include "../tile/softmax.cuh"
#include "../tile/tile_io.cuh"

namespace cuflash::fa2 {

// The warps of a block divide the q tile's rows; each keeps its rows' scores, weights and output in
// registers. K and V pass through rings of stages that all warps share. The output of wide heads
// takes so many registers that a warp would have too few rows. Pairs of warps then share rows, and
// each warp has half of a tile's keys and half of the output's columns, see forward_paired.cuh.
template <class Config>
struct ForwardTypes {
  using Storage = typename Config::Storage;
  using Compute = typename Config::Compute;
  static constexpr int sharing = Config::paired ? 2 : 1;  // warps that have the same rows
  static constexpr int rows_per_warp = Config::block_q / (Config::warps / sharing);
  static constexpr int threads = 32 * Config::warps;
  static constexpr bool weights_shared = Config::products == ProductKind::scalar || Config::paired;
  // Whether the output passes through the shared memory of Q on its way out.
  static constexpr bool staged = Config::copies != CopyKind::element &&
                                 sizeof(typename Config::Output) == sizeof(Storage) &&
                                 Config::head_dim_v <= Config::head_dim;

  // The number of keys whose scores are exponentiated together, while the products of earlier keys
  // run. Narrow heads take 64, a whole tile of the planner's table. With more keys a lane's sum
  // could exceed most_weight() although every weight is within the slack.
  static constexpr int keys_at_once =
      Config::maxima_on_demand && Config::head_dim_v <= 64 && Config::block_kv % 64 == 0 ? 64 : 16;
  static_assert(!Config::maxima_on_demand || !natural_logits<Config>,
                "maxima on demand need 16-bit storage");

  using Scores =
      WarpTile<Compute, Config::fragment_rows, rows_per_warp, Config::block_kv / sharing>;
  using Output =
      WarpTile<Compute, Config::fragment_rows, rows_per_warp, Config::head_dim_v / sharing>;
  using Rows = RowValues<Scores>;
  using QTile = SharedTile<Storage, Config::block_q, Config::head_dim>;
  using OutTile = SharedTile<Storage, Config::block_q, Config::head_dim_v>;
  using KTile = SharedTile<Storage, Config::block_kv, Config::head_dim>;
  using VTile = SharedTile<Storage, Config::block_kv, Config::head_dim_v>;
  using PTile = SharedTile<Storage, Config::block_q, Config::block_kv>;
};

// Each warp of a pair writes one number for each row: the row's maximum during the steps, and the
// row's sum after the last step.
template <class Config, bool paired = Config::paired>
struct PairStorage {
  SharedArray<Pair<typename Config::Compute>, Config::block_q> of_rows;
};
template <class Config>
struct PairStorage<Config, false> {};

template <class Config>
struct ForwardStorage : PairStorage<Config> {
  using Storage = typename Config::Storage;
  SharedArray<Storage, Config::block_q * Config::head_dim> q;  // [block_q, head_dim]
  SharedArray<Storage, Config::block_kv * Config::head_dim>
      k[Config::num_stages];  // [block_kv, head_dim]
  SharedArray<Storage, Config::block_kv * Config::head_dim_v>
      v[Config::num_stages];  // [block_kv, head_dim_v]
  SharedArray<Storage,
              ForwardTypes<Config>::weights_shared ? Config::block_q * Config::block_kv : 0>
      p;  // [block_q, block_kv], if the products are scalar or warps paired
};

// The kv tiles of a block's steps.
template <class Config, bool = Config::Score::skips>
struct StepBlocks : KvBlocks<Config> {
  using KvBlocks<Config>::KvBlocks;
};

// The tiles of the latest steps, by step; they stay in registers.
struct LatestTiles {
  int tiles[4];
  __device__ int of(int step) const {
    const int pair[2] = {step & 1 ? tiles[1] : tiles[0], step & 1 ? tiles[3] : tiles[2]};
    return step & 2 ? pair[1] : pair[0];
  }
  __device__ void set(int step, int tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[i] = (step & 3) == i ? tile : tiles[i];
  }
};

// StepBlocks of kernels that skip the kv tiles that a term of the scores hides entirely. A step's
// tile is found when its K is loaded.
template <class Config>
struct StepBlocks<Config, true> {
  const typename Config::Params& params;
  Sequence seq;
  WorkItem item;
  KvRange range;  // from the last step's tile to the first step's
  int steps = 0;
  LatestTiles latest{{0, 0, 0, 0}};

  __device__ StepBlocks(const typename Config::Params& params, const Sequence& seq,
                        const WorkItem& item)
      : params(params),
        seq(seq),
        item(item),
        range(shown_range<Config>(params, seq, item.head, item.q_tile)) {
    for (int tile = range.begin; tile < range.end; ++tile) steps += shows(tile);
  }
  __device__ int count() const { return steps; }
  // Finds a step's tile; the tile of the step before must be known.
  __device__ void find(int step) {
    int tile = before(step);
    while (tile > range.begin && !shows(tile)) --tile;
    latest.set(step, tile);
  }
  // The number of tiles that a step skips after the tile of the step before. The step's own tile
  // must have been found.
  __device__ int left_out(int step) const { return before(step) - latest.of(step); }
  __device__ Block operator[](int step) const {
    const int index = latest.of(step), q_begin = item.q_tile * Config::block_q;
    return {index, is_edge_tile<Config>(seq, q_begin, index * Config::block_kv)};
  }

 private:
  __device__ bool shows(int tile) const {
    return shows_tile<Config>(params, seq, item.head, item.q_tile, tile);
  }
  // The tile next to that of the step before.
  __device__ int before(int step) const {
    return step == 0 ? range.end - 1 : latest.of(step - 1) - 1;
  }
};

// The context of every step of a thread block, the same for all its tiles.
template <class Config, class Types = ForwardTypes<Config>>
struct ForwardContext {
  const typename Config::Params& params;
  ForwardStorage<Config>& shared;
  const WorkItem item;
  const Sequence seq;
  StepBlocks<Config> blocks;
  const int row0;  // of this warp in the q tile
  TileStream<Config::copies, Types::threads, Direction::down, typename Types::KTile> k_stream;
  TileStream<Config::copies, Types::threads, Direction::down, typename Types::VTile> v_stream;

  __device__ typename Types::QTile q() const { return {shared.q.data}; }
  __device__ typename Types::KTile k(int step) const {
    return {shared.k[step % Config::num_stages].data};
  }
  __device__ typename Types::VTile v(int step) const {
    return {shared.v[step % Config::num_stages].data};
  }
  __device__ typename Types::OutTile staging() const { return {shared.q.data}; }
  __device__ typename Types::PTile p() const { return {shared.p.data}; }
  // This warp's index among the warps that share its rows.
  __device__ int part() const {
    return Types::sharing > 1 ? static_cast<int>(threadIdx.x) / 32 % Types::sharing : 0;
  }
  __device__ int first_key() const { return part() * Types::Scores::columns; }  // within a tile
  // The number of keys of the last tile, with which the steps begin.
  __device__ int last_rows() const {
    return seq.seqlen_kv - (blocks.range.end - 1) * Config::block_kv;
  }
  __device__ int first_query() const { return item.q_tile * Config::block_q + row0; }
};

// The state of a warp's rows from step to step.
template <class Config, class Types = ForwardTypes<Config>>
struct ForwardState {
  typename Types::Output output;   // not yet divided by the row's sum
  typename Types::Rows reference;  // subtracted from the row's logits
  typename Types::Rows sum;        // of the weights, over this lane's columns
  bool settled;                    // every row of the warp has a reference
};

}  // namespace cuflash::fa2
