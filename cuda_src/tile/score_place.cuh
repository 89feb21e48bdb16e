// The position of a tile of scores: the queries and keys of a lane, and its place in an array that
// the copy engine brings to shared memory tile by tile.
#pragma once

#include "pair_bits.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// A tile in shared memory of the array that a term reads, and the position in it of a lane or a
// warp.
struct StagedLane {
  const void* panels = nullptr;
  int panel_bytes = 0;
  int row = 0;
  int column = 0;
  bool transposed = false;  // rows of scores are keys
};

// A lane's position in a tile of scores.
struct Lane {
  int batch;
  int head;  // of the queries
  int i;     // its first query
  int j;     // its first key
  StagedLane staged;
  ShownPairs shown;  // from an array of bits, if there is one
};

// Where the copy engine finds the pairs of an entry and a head in an array.
struct StagedPlace {
  const void* map;
  int batch;
  int head;
  unsigned long long policy;  // of the second-level cache
};

// The position of a tile of scores whose rows are queries, and of its elements.
struct RowsOfQueries {
  int batch;
  int head;  // of the queries
  int query0;
  int key0;
  StagedLane staged = {};  // of query0 and key0
  ShownPairs shown = {};   // of the lane
  __device__ Lane lane() const {
    const LanePosition position;
    return {batch,
            head,
            query0 + position.row,
            key0 + position.column,
            {staged.panels, staged.panel_bytes, staged.row + position.row,
             staged.column + position.column, false},
            shown};
  }
  template <class Tile>
  __device__ static constexpr int query_step(int m, int, int group, int) {
    return Tile::row(m, group);
  }
  template <class Tile>
  __device__ static constexpr int key_step(int, int n, int, int which) {
    return Tile::column(n, which);
  }
};

// The same for a transposed tile, whose rows are keys.
struct RowsOfKeys {
  int batch;
  int head;  // of the queries
  int query0;
  int key0;
  StagedLane staged = {};  // of query0 and key0
  ShownPairs shown = {};   // of the lane
  __device__ Lane lane() const {
    const LanePosition position;
    return {batch,
            head,
            query0 + position.column,
            key0 + position.row,
            {staged.panels, staged.panel_bytes, staged.row + position.column,
             staged.column + position.row, true},
            shown};
  }
  template <class Tile>
  __device__ static constexpr int query_step(int, int n, int, int which) {
    return Tile::column(n, which);
  }
  template <class Tile>
  __device__ static constexpr int key_step(int m, int, int group, int) {
    return Tile::row(m, group);
  }
};

}  // namespace cuflash
