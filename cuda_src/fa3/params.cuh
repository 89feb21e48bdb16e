// The structures that launches of FlashAttention-3 pass by value, see ../params.cuh.
#pragma once

#include "../params.cuh"

namespace cuflash {

// The copy engine's description of a tensor: CUtensorMap, whose content is private to the driver.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// FlashAttention-3 forward. The maps describe q, k and v as [batch, head, row, column]. The tile
// counter is 0 before and after a launch.
struct Fa3ForwardParams {
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  Tensor out;
  RowVector lse;
  void* tile_counter;
  double scale;
  long long head_group;  // heads whose tiles run together, see tile/schedule.cuh
  Shape shape;
};

}  // namespace cuflash
