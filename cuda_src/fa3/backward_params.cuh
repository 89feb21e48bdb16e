// The parameters of the kernels of FlashAttention-3's backward pass, see params.cuh.
#pragma once

#include "params.cuh"

namespace cuflash {

// FlashAttention-3 backward, the main kernel. The workspace is that of Fa2BackwardParams except for
// `turns`: where blocks clear for others it holds the HeadCounters of every kv head and then, for
// an ordered sum, a counter for every q tile of a head.
struct Fa3BackwardParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  Tensor dk;
  Tensor dv;
  Tensor dq;  // used by blocks of rows, see backward_rows.cuh
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  void* turns;
  double scale;
  long long head_group;   // heads whose tiles run together, see tile/schedule.cuh
  long long padded_rows;  // rows of a head in the workspace
  long long ahead;        // kv tiles between a block's own and the one whose share it clears
  long long convert_lag;  // kv tiles between a round of blocks and the rows it converts
  Shape shape;            // heads_kv times `parts` where every tile has them
  // The rest is used where several blocks share a kv tile, see backward_parts.cuh. It comes last,
  // so that the offsets before it never change.
  long long parts;
  long long padded_keys;  // rows of a head in the workspace, or of a cut tile: whole kv tiles
  void* dk_parts;
  void* dv_parts;
  long long whole_tiles;  // of all heads, where only the tiles after them are cut
};

// See backward_few.cu. The workspace is that of Fa3BackwardParams, without `turns`.
struct Fa3BackwardFewParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  Tensor dk;
  Tensor dv;
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  double scale;
  long long padded_rows;  // rows of a head in the workspace
  long long kv_splits;    // blocks that share the kv tiles of a head
  Shape shape;
};

// See backward_short.cu. The workspace is that of Fa3BackwardParams, without sums of dQ and
// `turns`.
struct Fa3BackwardShortParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  Tensor dq;
  Tensor dk;
  Tensor dv;
  void* row_lse;
  void* delta;
  double scale;
  long long padded_rows;  // rows of a head in the workspace
  Shape shape;
};

// See sum_parts.cu.
struct SumPartsParams {
  Tensor dk;
  Tensor dv;
  void* dk_parts;
  void* dv_parts;
  long long parts;
  long long padded_keys;
  Shape shape;
  long long whole_tiles;
};

}  // namespace cuflash
