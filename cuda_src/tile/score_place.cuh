// Where a tile of scores stands: the queries and keys of a lane, and what it reads of an array that
// comes to shared memory tile by tile.
#pragma once

#include "pair_bits.cuh"
#include "warp_tile.cuh"

namespace cuflash {

// Of a term whose array comes to shared memory tile by tile: the tile, and where in it a lane or a
// warp is.
struct StagedLane {
  const void* panels = nullptr;
  int panel_bytes = 0;
  int row = 0;
  int column = 0;
  bool transposed = false;  // rows of scores are keys
};

// What a lane has of a tile of scores.
struct Lane {
  int batch;
  int head;  // of the queries
  int i;     // its first query
  int j;     // its first key
  StagedLane staged;
  ShownPairs shown;  // by an array of bits, if there is one
};

// Where the copy engine finds an array of pairs of an entry and a head.
struct StagedPlace {
  const void* map;
  int batch;
  int head;
  unsigned long long policy;  // of the second-level cache
};

// Where a tile of scores stands whose rows are queries, and what an element of it is of.
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

// The same of a transposed tile, whose rows are keys.
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
