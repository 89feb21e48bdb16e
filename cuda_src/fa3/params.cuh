// The structures that launches of FlashAttention-3 pass by value, see ../params.cuh.
#pragma once

#include "../params.cuh"

namespace cuflash {

// What the copy engine knows of a tensor: CUtensorMap of the driver, which alone knows its inside.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// FlashAttention-3 forward. q, k and v come through their maps, [batch, head, row, column]. The
// tile counter is 0 before a launch and after it.
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
