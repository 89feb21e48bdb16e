// What launches of FlashAttention-3's backward pass give by value, see params.cuh.
#pragma once

#include "params.cuh"

namespace cuflash {

// FlashAttention-3 backward, the main kernel. Workspace as in Fa2BackwardParams, but for `turns`:
// with blocks of rows the HeadCounters of every kv head, and behind them for an ordered sum a
// counter of every q tile of a head. Tensors from dq on and the two distances are theirs too.
struct Fa3BackwardParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  Tensor dk;
  Tensor dv;
  Tensor dq;
  Tensor out;
  Tensor dout;
  RowVector lse;
  RowVector dlse;
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  void* turns;
  double scale;
  long long section;      // heads whose tiles run together, see tile/schedule.cuh
  long long padded_rows;  // rows of a head in the workspace
  long long ahead;   // kv tiles from those of blocks to those whose rows are prepared meanwhile
  long long behind;  // and from those whose rows are finished meanwhile
  Shape shape;
};

}  // namespace cuflash
