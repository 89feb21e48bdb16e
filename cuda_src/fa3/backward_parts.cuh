// FlashAttention-3 backward, gradients of keys in parts. Where kv heads are few, several blocks
// share a kv tile. Each has a part of the group's query heads or, with Config::cut, an equal share
// of the tile's steps, wherever it begins and ends. Code that counts blocks or tiles then sees
// `parts` times as many kv heads, see Fa3BackwardParams. Where blocks have whole query heads, only
// the loads of K and V and the stores of dK and dV differ from those of more kv heads. Where steps
// are cut, a block begins at another step too, and where those of every tile are, no block clears
// or converts sums of dQ.
//
// With Config::cut_last only the tiles after the first `whole_tiles` are cut: those that would run
// in a last round, with most multiprocessors idle. Heads are counted as they are; the blocks of
// parts come after those of whole tiles. They have nothing to clear, and blocks of rows count them.
//
// A block stores its dK and dV in the workspace in float32, as fragments of 16 x 8 in the layout of
// the warps, contiguous over [batch, heads_kv * parts, padded_keys / 16, columns / 8], so that a
// warp stores 512 consecutive bytes; of last tiles over [cut tiles, parts, block_kv / 16,
// columns / 8]. No block waits for them: sum_parts.cu is a separate launch.
#pragma once

#include "../ptx/opaque.cuh"
#include "../tile/schedule.cuh"
#include "../tile/warp_tile.cuh"
#include "backward_params.cuh"

namespace cuflash::fa3 {

// Query heads of a block's steps.
template <class Config>
__device__ inline int group_of(const typename Config::Params& params) {
  if constexpr (Config::cut && !Config::cut_last) {
    return params.shape.heads_q / (params.shape.heads_kv / static_cast<int>(params.parts));
  }
  return params.shape.heads_q / params.shape.heads_kv;
}

// The kv tile of a block, from its place among the blocks with a tile.
template <class Config, bool = Config::cut_last>
struct PlacedTile {
  unsigned tile;  // in the order of kv tiles

  __device__ PlacedTile(const typename Config::Params&, unsigned place) : tile(place) {}
};
template <class Config>
struct PlacedTile<Config, true> {
  unsigned tile;
  unsigned part;
  unsigned parts;  // of the tile: 1 if it is whole
  int cut_place;   // of the block among those of parts; negative if its tile is whole

  __device__ PlacedTile(const typename Config::Params& params, unsigned place) {
    const auto whole = static_cast<unsigned>(params.whole_tiles);
    const bool cut = place >= whole;
    parts = cut ? static_cast<unsigned>(params.parts) : 1;
    tile = cut ? whole + (place - whole) / parts : place;
    part = cut ? (place - whole) % parts : 0;
    cut_place = static_cast<int>(place - whole);
  }
};

// The number of blocks with a tile, for a number of kv tiles.
template <class Config>
__device__ inline unsigned places_of(const typename Config::Params& params, unsigned tiles) {
  if constexpr (Config::cut_last) {
    const auto whole = static_cast<unsigned>(params.whole_tiles);
    return whole + (tiles - whole) * static_cast<unsigned>(params.parts);
  }
  return tiles;
}

// The steps of a block where several blocks cut the steps of a kv tile: `cut_count` of them, from
// step `cut_begin` on. Empty where a block has all steps of its query heads.
template <class Config, bool = Config::cut>
struct CutSteps {
  __device__ CutSteps(const typename Config::Params&, const WorkItem&, const Sequence&,
                      const PlacedTile<Config>&) {}
};
template <class Config>
struct CutSteps<Config, true> {
  int cut_begin;
  int cut_count;
  int cut_place;  // see PlacedTile

  __device__ bool has_whole_tile() const { return Config::cut_last && cut_place < 0; }

  // Part p of P has the steps from n p / P to n (p + 1) / P of all n.
  __device__ CutSteps(const typename Config::Params& params, const WorkItem& item,
                      const Sequence& seq, const PlacedTile<Config>& placed) {
    static_assert(Config::parted && !Config::listed && !Config::ordered &&
                      (Config::cut_last || Config::kv_tiles_per_convert_block == 0),
                  "no block has all rows of a head");
    const QBlocks<Config> blocks(seq, item.kv_begin);
    const auto steps =
        static_cast<unsigned>(max(0, blocks.end - blocks.begin) * group_of<Config>(params));
    auto parts = static_cast<unsigned>(params.parts);
    unsigned part = static_cast<unsigned>(item.head) % parts;
    if constexpr (Config::cut_last) {
      parts = placed.parts;
      part = placed.part;
      cut_place = placed.cut_place;
    }
    // Each has `each` steps, and some have one of the others. Divisions of 64 bits take longer.
    const unsigned each = steps / parts;
    const unsigned others = steps % parts;
    const unsigned earlier = others * part / parts;
    cut_begin = static_cast<int>(each * part + earlier);
    cut_count = static_cast<int>(each + others * (part + 1) / parts - earlier);
  }
};

constexpr int kRowsOfFragment = 16;

// A lane's elements of a fragment: [row group][column of two].
struct alignas(16) LaneFragment {
  float value[2][2];
};

// Index of this lane's elements of the fragment at (row, column); rows count through all heads.
template <int columns>
__device__ inline long long part_index(long long row, int column) {
  const long long fragment = row / kRowsOfFragment * (columns / 8) + column / 8;
  return (fragment * 32 + ptx::opaque_lane()) * 4;
}

// Stores in memory the 16 rows that a warp has finished, with all their columns.
template <class Tile>
__device__ __forceinline__ void store_part(float* parts, const Tile& tile, long long row) {
  static_assert(Tile::rows == kRowsOfFragment, "one row of fragments");
  auto* const to = reinterpret_cast<LaneFragment*>(parts + part_index<Tile::columns>(row, 0));
#pragma unroll
  for (int n = 0; n < Tile::column_fragments; ++n) {
    const auto& groups = tile.value[0][n];
    to[n * 32] = {{{groups[0][0], groups[0][1]}, {groups[1][0], groups[1][1]}}};
  }
}

// Stores a warpgroup's tile of columns x rows, from row `row` of the parts on. In every product of
// 64 columns a warp has 16; Tile has these, product after product.
template <class Tile>
__device__ __forceinline__ void store_part_transposed(float* parts, const Tile& tile,
                                                      long long row) {
  constexpr int columns = 4 * Tile::rows;
  constexpr int of_fragment = 32 * sizeof(LaneFragment) / sizeof(float);
  const int lane = ptx::opaque_lane();
  const int column = ptx::opaque_warp() % 4 * 16;
  // Rows and columns of a fragment change their places: the lane's elements belong to two lanes,
  // of rows lane % 4 * 2 and the next one.
  const int to_lane = lane % 4 * 2 * 4 + lane / 8;
  float* const to = parts + row * columns + column / 8 * of_fragment + to_lane * 4 + lane / 4 % 2;
  Tile::for_each_pair([&](int m, int n, int group) {
    float* const at = to + (n / 2 * (columns / 8) + m * 8 + group) * of_fragment + n % 2 * 2;
    at[0] = tile.value[m][n][group][0];
    at[16] = tile.value[m][n][group][1];
  });
}

// Loads some columns of 16 rows from memory.
template <int columns, class Tile>
__device__ __forceinline__ void load_part(Tile& tile, const float* parts, long long row,
                                          int column) {
  static_assert(Tile::rows == kRowsOfFragment, "one row of fragments");
  const auto* const from =
      reinterpret_cast<const LaneFragment*>(parts + part_index<columns>(row, column));
#pragma unroll
  for (int n = 0; n < Tile::column_fragments; ++n) {
    const LaneFragment fragment = from[n * 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.value[0][n][i / 2][i % 2] = fragment.value[i / 2][i % 2];
  }
}

// `threads` threads clear `rows` rows.
template <int columns, int rows, int threads>
__device__ inline void clear_part(float* parts, long long row) {
  auto* const to = reinterpret_cast<LaneFragment*>(parts + row * columns);
  for (int i = threadIdx.x; i < rows * columns / 4; i += threads) to[i] = LaneFragment{};
}

}  // namespace cuflash::fa3
