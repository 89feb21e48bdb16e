// What launches of FlashAttention-3's backward pass give by value, see params.cuh.
#pragma once

#include "params.cuh"

namespace cuflash {

// FlashAttention-3 backward, the main kernel. Workspace as in Fa2BackwardParams, but that an
// ordered sum has a counter in `turns` for every q tile of a head.
struct Fa3BackwardParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  TensorMap dout_map;
  Tensor dk;
  Tensor dv;
  void* row_lse;
  void* delta;
  void* dq_accumulator;
  void* turns;
  double scale;
  long long section;      // heads whose tiles run together, see tile/schedule.cuh
  long long padded_rows;  // rows of a head in the workspace
  Shape shape;
};

}  // namespace cuflash
