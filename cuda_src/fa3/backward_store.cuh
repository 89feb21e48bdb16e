// FlashAttention-3 backward: the end of a block stores the finished gradients of its keys, or the
// sums of its part.
#pragma once

#include "backward_types.cuh"

namespace cuflash::fa3 {

// A warp stores 16 rows of the tensor, from row `first + row` of the kv tile on.
template <class Config, class Gradient>
__device__ __forceinline__ void store_rows(const BackwardContext<Config>& c, Gradient& gradient,
                                           const Tensor& tensor, int first, int row, int columns) {
  const int key = c.item.kv_begin + first + row;
  store_staged(gradient, c.shared.staging[threadIdx.x / 32 - 4],
               kv_row<typename Config::Storage>(tensor, c.seq, c.item.head, key), tensor.row_stride,
               c.seq.rows_kv - key, columns);
}

// The same times `factor`, in the tensor or in this block's part.
template <class Config, class Gradient>
__device__ __forceinline__ void store_gradient(const BackwardContext<Config>& c, Gradient& gradient,
                                               const Tensor& tensor, void* parts, int first,
                                               int row, int columns, float factor) {
  gradient.for_each([&](float& x, int, int, int, int) { x *= factor; });
  if constexpr (Config::cut_last) {
    if (c.has_whole_tile()) {
      store_rows(c, gradient, tensor, first, row, columns);
      return;
    }
  }
  if constexpr (Config::parted) {
    store_part(static_cast<float*>(parts), gradient, part_row(c) + first + row);
  } else {
    store_rows(c, gradient, tensor, first, row, columns);
  }
}

}  // namespace cuflash::fa3
